"""A server that is loading, as those see it who wait for it: child processes whose loading the test holds up."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from retrieval.process import RetrieverProcess
from retrieval.types import RetrieverStartError
from tests.processes import alive, with_patience

ROOT = Path(__file__).resolve().parents[2]
HELD_UP = """
import itertools, pathlib, sys, time
from retrieval import server

def load(options, settings, progress):
    for step in itertools.count():
        progress("step 0" if sys.argv[2] == "hung" else f"step {step}")
        if pathlib.Path(sys.argv[1]).exists():
            return opened(options, settings, progress)
        time.sleep(0.1)

opened, server.load = server.load, load
server.main(sys.argv[3:])
"""


def answer(url: str, body: dict | None = None) -> tuple[int, dict]:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def start(gate: Path, index: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", HELD_UP, str(gate), "slow", "--index", index, "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    words = process.stdout.readline().split()
    assert words[:3] == ["retriever", "loading", "at"]
    return process, words[3]


@pytest.mark.slow
def test_a_server_says_that_it_is_loading_until_it_can_search(bm25_index, corpus, tmp_path):
    gate, announced = tmp_path / "gate", tmp_path / "search.url"
    process, url = start(gate, bm25_index, "--announce", str(announced))
    with process:
        body = {"queries": corpus.words[:1]}
        for status, said in (answer(url + "/health"), answer(url + "/retrieve", body)):
            assert status == 503 and said["status"] == "loading" and said["detail"].startswith("step ")
        assert not announced.exists()
        gate.touch()
        assert process.stdout.readline().startswith(f"retriever ready at {url}")
        assert announced.read_text() == url
        assert answer(url + "/health")[1]["status"] == "ok"
        status, found = answer(url + "/retrieve", body)
        assert status == 200 and len(found["result"][0]) == 3
        process.terminate()
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_loading_can_be_stopped(bm25_index, tmp_path, number):
    process, _ = start(tmp_path / "gate", bm25_index)
    with process:
        process.send_signal(number)
        assert process.wait(300) == 0


@pytest.mark.slow
def test_a_server_that_cannot_be_announced_ends(bm25_index, tmp_path):
    (tmp_path / "gate").touch()
    process, _ = start(tmp_path / "gate", bm25_index, "--announce", str(tmp_path / "none" / "search.url"))
    with process:
        assert process.wait(300) == 2


def held_up(index: str, gate: Path, how: str, monkeypatch, **options) -> RetrieverProcess:
    process = RetrieverProcess(index, **options)
    command = process._command
    held = lambda: [sys.executable, "-c", HELD_UP, str(gate), how, *command()[3:]]  # noqa: E731
    monkeypatch.setattr(process, "_command", held)
    return process


@pytest.mark.slow
def test_a_start_may_take_as_long_as_it_shows_progress(bm25_index, corpus, tmp_path, monkeypatch):
    def check(seconds):
        gate = tmp_path / f"gate-{seconds}"
        process = held_up(bm25_index, gate, "slow", monkeypatch, start_timeout=seconds)
        timer = threading.Timer(2 * seconds, gate.touch)
        timer.start()
        try:
            assert answer(process.start() + "/health")[0] == 200 and gate.exists()
        finally:
            process.stop()
            timer.cancel()

    with_patience(check, 4, 30, 120)


@pytest.mark.slow
def test_a_start_that_says_the_same_for_ever_is_ended(bm25_index, tmp_path, monkeypatch):
    def check(seconds):
        process = held_up(bm25_index, tmp_path / "gate", "hung", monkeypatch, start_timeout=seconds)
        said = rf"no progress for {seconds} s while starting \(last report: step 0\)"
        with pytest.raises(RetrieverStartError, match=said):
            process.start()
        assert not alive(process._server.pid)
        process.stop()

    with_patience(check, 4, 30, 120)
