"""docs/one_gpu.md and docs/eight_gpus.md: their commands are valid, their table is what `make size` counts."""

import re
import shlex

import pytest

from experiments.commands.cli import main
from experiments.registry.project import ROOT

ONE, EIGHT = ((ROOT / "docs" / name).read_text() for name in ("one_gpu.md", "eight_gpus.md"))
FITTING = sorted({c for c in re.findall(r"(make size .*?)(?:`|$)", ONE + EIGHT, re.MULTILINE) if " GPU=" in c})


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path))


@pytest.mark.parametrize("command", FITTING)
def test_a_command_that_names_a_gpu_fits_it(command, capsys):
    """The other commands are validated by tests/docs/test_commands.py."""
    given = dict(word.split("=", 1) for word in shlex.split(command)[2:])
    words = ["--gpus", given["GPUS"], "--gpu", given["GPU"], *shlex.split(given.get("ARGS", ""))]
    assert main(["size", given["EXP"], *words]) == 0
    assert "TOO MUCH" not in capsys.readouterr().out


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
