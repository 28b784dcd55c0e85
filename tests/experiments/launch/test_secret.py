"""The secret that the launcher makes: one for the outputs, which stages have and nobody else reads."""

import os
import re
import stat
import threading

import pytest

from common.secret import SECRET_VARIABLE
from experiments.launch import retriever_identity
from experiments.launch.shared_secret import FILE, share_secret
from experiments.registry.errors import ExperimentError
from retrieval.batching import OwnerThread
from tests.retrieval.serving import serving


class Nothing:
    metadata = ({"kind": "bm25", "corpus_sha256": "a" * 64, "passages": 3},)

    def search(self, queries: list[str], k: int) -> list[list]:
        return [[] for _ in queries]

    def close(self) -> None:
        pass


def test_it_is_made_once_for_the_owner_alone(tmp_path, monkeypatch):
    share_secret(tmp_path / "outputs")
    path = tmp_path / "outputs" / FILE
    made = os.environ[SECRET_VARIABLE]
    assert re.fullmatch("[0-9a-f]{64}", made) and path.read_text() == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    share_secret(tmp_path / "others")
    assert os.environ[SECRET_VARIABLE] == made and not (tmp_path / "others").exists(), "what is given stays"
    monkeypatch.delenv(SECRET_VARIABLE)
    share_secret(tmp_path / "outputs")  # as another node does, or a run that goes on
    assert os.environ[SECRET_VARIABLE] == made


def test_a_node_waits_until_another_has_written_it(tmp_path):
    path = tmp_path / FILE
    path.touch()
    writer = threading.Timer(0.2, path.write_text, ["written"])
    writer.start()
    share_secret(tmp_path)
    assert os.environ[SECRET_VARIABLE] == "written"


def test_a_stage_has_it_and_writes_it_nowhere(workshop):
    """Its own search servers demand it, and its clients send it to those that others have started."""
    workshop.write("a", "experiment: {kind: task, summary: x}\ntask: {class_path: tests.experiments.toys.Confidant}\n")
    done = workshop.run("train", "a")
    assert done.returncode == 0, done.stderr
    secret = (workshop.project.outputs / FILE).read_text()
    folder = workshop.graph("a").target().folder
    assert (folder / "confided").read_text() == f"{len(secret)} characters"
    written = [path for path in workshop.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert written == [workshop.project.outputs / FILE]
    assert secret not in done.stdout + done.stderr


def test_a_search_server_with_another_secret_is_told_before_the_stage_starts(monkeypatch):
    with serving(OwnerThread(lambda _: Nothing()), "its-secret") as url:
        monkeypatch.setenv(SECRET_VARIABLE, "ours")
        with pytest.raises(ExperimentError, match=f"'x' searches over {url}, which wants another secret than is sent"):
            retriever_identity.identity(url, "x", 60, "make retriever")
        monkeypatch.setenv(SECRET_VARIABLE, "its-secret")
        assert retriever_identity.identity(url, "x", 60, "make retriever") == [*Nothing.metadata]
