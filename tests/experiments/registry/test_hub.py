"""Models and data of the hub, named in an experiment: from its HTTP API to the checked experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from experiments.commands.cli import main
from experiments.registry.errors import ExperimentError
from experiments.registry.hub import _snapshot, with_local_files
from tests.end_to_end.test_own_data import write_own
from tests.experiments.hub import serve

DATA = "hf://datasets/lab/qa"


@pytest.fixture
def hub(tmp_path, monkeypatch, model_dir):
    """The model, questions and a corpus of the own-data tests at revision v1, and other questions in main."""
    write_own(tmp_path)
    _snapshot.cache_clear()
    with serve("hf_right") as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        files = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        model = {file.name: file.read_bytes() for file in model_dir.iterdir() if file.is_file()}
        data = {f"data/{name}": (tmp_path / name).read_bytes() for name in ("q.csv", "c.jsonl")}
        found.published["models/lab/agent"] = {"v1": {**model, "onnx/model.onnx": b"another format"}}
        found.published["datasets/lab/qa"] = {
            "v1": data,
            "main": {"data/q.csv": b"prompt,answer\nWhy?,So\n"},
            "refs/convert/parquet": {"default/train/0.parquet": b"a", "default/train/1.parquet": b"b"},
        }
        yield found


def resolved(reference: str, key: str = "train_files") -> str:
    return with_local_files({"data": {"init_args": {key: [reference]}}}, Path("/"))["data"]["init_args"][key][0]


def test_an_experiment_on_a_model_and_data_of_the_hub(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "out"))
    own = [word for word in write_own(tmp_path) if "columns" in word]
    words = ["check-data", "my_grpo", "--paths.model=lab/agent@v1", f"--paths.questions={DATA}@v1/data/q.csv",
             f"--paths.corpus={DATA}@v1/data/c.jsonl", *own]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "40 passages" in said and "train 32, val 4, test 4" in said and "Where was Person 0 born?" in said
    read = len(hub.downloads)
    _snapshot.cache_clear()  # as in another process
    assert not any("onnx" in path for path in hub.downloads)
    assert main(words) == 0 and len(hub.downloads) == read, "the second run reads the cache"


def test_revisions_files_and_folders(hub):
    assert Path(resolved(f"{DATA}/data/q.csv")).read_text() == "prompt,answer\nWhy?,So\n"
    assert len(Path(resolved(f"{DATA}@v1/data/q.csv")).read_text().splitlines()) == 41
    folder = resolved(f"{DATA}@refs/convert/parquet/default/train")
    assert [file.name for file in sorted(Path(folder).iterdir())] == ["0.parquet", "1.parquet"]
    assert resolved(f"gsm8k:{DATA}/data/q.csv").startswith("gsm8k:/")
    assert resolved("lab/agent@v1") == "lab/agent@v1", "a file of this name, not a model"
    assert Path(resolved("lab/agent@v1", "policy"), "config.json").is_file()


def test_what_the_hub_lacks_is_named(hub, monkeypatch):
    for reference, key, said in (
        (f"{DATA}/test.csv", "train_files", r"data\.init_args\.train_files\[0\].*test.csv: no such file .* data/q.csv"),
        (f"{DATA}@v2/q.csv", "train_files", "dataset lab/qa@v2 of the hub: .*gated: HF_TOKEN"),
        ("hf://datasets/lab/none/q.csv", "train_files", "dataset lab/none of the hub"),
        ("hf://lab/qa/q.csv", "train_files", r"expected hf://datasets/owner/name\[@revision\]\[/file or folder\]"),
        ("lab/none@v1", "policy", "model lab/none@v1 of the hub"),
    ):
        with pytest.raises(ExperimentError, match=said) as caught:
            resolved(reference, key)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ExperimentError, match="or give a local path"):
        resolved("lab/never@v1", "policy")
