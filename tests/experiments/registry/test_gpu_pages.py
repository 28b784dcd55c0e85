"""docs/one_gpu.md and docs/eight_gpus.md: their commands are valid, their table is what `make size` counts."""

import re
import shlex

import pytest

from experiments.commands.cli import main
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check

ONE, EIGHT = ((ROOT / "docs" / name).read_text() for name in ("one_gpu.md", "eight_gpus.md"))
COMMANDS = sorted(set(re.findall(r"(make (?:train|size|engine) .*?)(?:`|$)", ONE + EIGHT, re.MULTILINE)))
PLACES = {"NNODES": "num_nodes", "NPROC": "devices"}  # the Makefile's words for these of the trainer


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_valid(command, tmp_path, capsys):
    _, target, *words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words)
    overrides = shlex.split(given.get("ARGS", ""))
    if target == "size":
        more = ["--gpu", given["GPU"]] if "GPU" in given else []
        assert main(["size", given["EXP"], "--gpus", given["GPUS"], *more, *overrides]) == 0
        assert not more or "TOO MUCH" not in capsys.readouterr().out, "the page says that it fits"
        return
    overrides += [f"--trainer.{name}={given[key]}" for key, name in PLACES.items() if key in given]
    check(Graph(Project(outputs=tmp_path), given["EXP"], parse(overrides), None).target(), ROOT)


def test_the_table_is_what_is_counted(capsys):
    rows = re.findall(r"^\| `(quick_\S+)` \| (\S+) \| (\S+) \| (\d+ of \d+) \| (\S+) \|$", ONE, re.MULTILINE)
    assert len(rows) == 9
    for name, *cells in rows:
        assert main(["size", name, "--gpus", "1", "--gpu", "4090"]) == 0
        said = capsys.readouterr().out
        named = (
            "training, engine asleep",
            "sampling, optimizer away",
            "sequences at once per GPU",
            "hours, at 0.35 of it",
        )
        assert [re.search(f"{words} +(.+)", said)[1] for words in named] == cells, name
        assert "TOO MUCH" not in said
