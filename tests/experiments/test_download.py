"""``make download`` from a stand-in for the hub: what was cut off is fetched again, nothing is joined of no parts."""

from argparse import Namespace

import pytest
from huggingface_hub import constants

from experiments.commands.command import make_graph
from experiments.commands.download import download
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from tests.experiments.hub import serve

TASK = """
experiment:
  kind: task
  summary: a note
  needs: {it: {path: PATH, hub: lab/data, repo_type: dataset, how: by hand, OPTIONS}}
task: {class_path: tests.experiments.toys.Note, init_args: {text: hello}}
"""


@pytest.fixture
def hub(monkeypatch):
    with serve("hf_right") as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        files = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


@pytest.fixture
def fetch(workshop, tmp_path):
    def run(path, options="files: []"):
        workshop.write("x", TASK.replace("PATH", str(tmp_path / path)).replace("OPTIONS", options))
        context = RunContext(workshop.project, "x", (), None)
        download(Namespace(compare=False), context)
        return make_graph(context).target().needs[0]

    return run


def test_a_repository_that_was_fetched_in_part_is_fetched_again(hub, fetch, tmp_path):
    files = {"a.json": b"{}", "b.json": b"[]"}
    hub.published["datasets/lab/data"] = {"main": files}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_bytes(b"{}")
    (tmp_path / ".data.fetching").touch()  # as Ctrl-C leaves it
    assert fetch("data").present
    assert (tmp_path / "data" / "b.json").read_bytes() == b"[]" and not (tmp_path / ".data.fetching").exists()
    done = len(hub.downloads)
    assert fetch("data").present and len(hub.downloads) == done


def test_single_files_of_a_folder(hub, fetch, tmp_path):
    hub.published["datasets/lab/data"] = {"main": {"one/dev.jsonl": b"1", "two/dev.jsonl": b"2", "other.bin": b"3"}}
    assert fetch("data", "files: [one/dev.jsonl, two/dev.jsonl]").present
    assert sorted(p.name for p in (tmp_path / "data").glob("[a-z]*")) == ["one", "two"]


def test_parts_become_one_file_and_no_parts_none(hub, fetch, tmp_path):
    options = "files: [part*], assemble: true"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "corpus").write_text("fetched before")
    with pytest.raises(ExperimentError, match="these could not be fetched") as refused:
        fetch("there/index", options)  # the hub does not know the data set
    assert "continues where it stopped" in str(refused.value) and not (tmp_path / "there" / "index").exists()
    hub.published["datasets/lab/data"] = {"main": {"part1": b"a", "part2": b"b"}}
    assert fetch("there/index", options).present
    assert (tmp_path / "there" / "index").read_bytes() == b"ab"


def test_a_hub_that_is_not_there_is_one_message(fetch, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ExperimentError, match="these could not be fetched"):
        fetch("data")
