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
WHOLE, OFFLOADED, LOW_RANK = (
    shlex.split(re.search(pattern, ONE)[1])
    for pattern in ("()", '(--trainer.strategy.class_path.*)"', '(--model.lora.rank.*)"')
)


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
    rows = re.findall(r"^\| `(my_\w+)` \| (\S+) \| (\S*) ?\| (.*) \| (.*) \| (.*) \|$", ONE, re.MULTILINE)
    assert len(rows) == 5
    for name, model, teacher, *cells in rows:
        paths = [f"--paths.model=Qwen/{model}", *([f"--paths.teacher=Qwen/{teacher}"] if teacher else [])]
        for cell, words in zip(cells, (WHOLE, OFFLOADED, LOW_RANK), strict=True):
            assert main(["size", name, "--gpus", "1", "--gpu", "4090", *paths, *words]) == 0
            said = re.search(r"all of 24 +(\S+)( TOO MUCH)?", capsys.readouterr().out)
            assert cell == said[1] + (" (!)" if said[2] else ""), (name, model, words)
