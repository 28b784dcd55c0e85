"""The secret of servers that other machines reach: who needs it, who is refused without, and where it never stands."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from common.secret import SECRET_VARIABLE, authorization, is_local
from retrieval.batching import OwnerThread
from retrieval.client import RetrieverClient
from retrieval.types import Document, RetrievalError
from tests.retrieval.serving import serving

ROOT = Path(__file__).parents[2]
SECRET = "5ec2e7-0f-the-test"


class Echo:
    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        return [[Document(query, query, "", 1.0)] for query in queries]

    def close(self) -> None:
        pass


def run(module: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", module, *words]
    kept = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def backend(tmp_path) -> Path:
    path = tmp_path / "backend.yaml"
    path.write_text("class_path: tests.retrieval.test_retrieval_secret.Echo\n")
    return path


@pytest.mark.parametrize("host", ["::"])
def test_a_search_server_that_other_machines_reach_does_not_start_without(backend, host):
    done = run("retrieval.server", "--backend", str(backend), "--host", host, "--port", "0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"other machines can reach {host}, so the server needs a secret: set {SECRET_VARIABLE}" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; write a secret"),
        ("sécret", "one word"),
    ],
)
def test_a_file_without_a_secret_is_refused(backend, tmp_path, text, said):
    (tmp_path / "secret").write_text(text)
    words = ["--backend", str(backend), "--port", "0", "--secret-file", str(tmp_path / "secret")]
    done = run("retrieval.server", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not text or text not in done.stderr


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("", False),
        ("node7", False),
    ],
)
def test_who_reaches_it(host, local):
    assert is_local(host) == local


def status(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_whoever_does_not_send_it_is_refused(monkeypatch):
    async def search(url: str) -> str:
        client = RetrieverClient([url], retries=0)
        try:
            return (await client.search(["a query"], 1))[0][0].id
        finally:
            await client.close()

    with serving(OwnerThread(lambda _: Echo()), SECRET) as url:
        for page in ("/health", "/retrieve", "/none"):
            assert status(url + page)[0] == 401
        wrong = ("", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", f"bearer {SECRET}", "Bearer \xe9")
        for sent in wrong:
            code, text = status(url + "/health", Authorization=sent)
            assert code == 401 and "another was sent" in text and SECRET not in text and "\n" not in text
        assert status(url + "/health", Authorization=f"Bearer {SECRET}")[0] == 200
        with pytest.raises(RetrievalError, match=f"status 401: .*none was sent: set {SECRET_VARIABLE}"):
            asyncio.run(search(url))
        monkeypatch.setenv(SECRET_VARIABLE, SECRET)
        assert asyncio.run(search(url)) == "a query"
        monkeypatch.setenv(SECRET_VARIABLE, "another")
        with pytest.raises(RetrievalError, match="status 401") as failure:
            asyncio.run(search(url))
        assert "another" not in str(failure.value).replace("another was sent", "")


@pytest.mark.parametrize("how", ["file", "environment"])
def test_it_stands_in_no_argument_and_no_output(backend, tmp_path, monkeypatch, how):
    (tmp_path / "secret").write_text(SECRET + "\n")
    if how == "environment":
        monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    words = ["--secret-file", str(tmp_path / "secret")] if how == "file" else []
    command = [sys.executable, "-m", "retrieval.server", "--backend", str(backend), "--host", "0.0.0.0", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *words], cwd=ROOT, **pipes) as process:
        try:
            lines = []
            while not lines or not lines[-1].startswith("retriever ready at"):
                lines.append(process.stdout.readline())
                assert lines[-1], lines
            url = lines[-1].split()[3].replace("0.0.0.0", "127.0.0.1")
            assert status(url + "/health")[0] == 401
            monkeypatch.setenv(SECRET_VARIABLE, SECRET)
            assert status(url + "/health", **authorization())[0] == 200
            arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        finally:
            process.send_signal(signal.SIGTERM)
        output = "".join(lines) + process.stdout.read()
    assert process.returncode == 0
    assert SECRET not in output and SECRET.encode() not in arguments
