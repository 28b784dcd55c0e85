"""Commands that are printed, read by a shell, by make, and by the shell of make's recipe."""

import os
import subprocess

import pytest

from common.make_command import COMMAND_VARIABLE, make_command, same_run
from experiments.registry.project import ROOT

OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
HARD = [
    "plain", "a b", " a ", "it's", 'say "hi"', "$HOME", "$(ls)", "`ls`", "\\$x", "a\\b", "{a: 'b $c'}", "#1", "!x",
    "a;b", "é, 问题",
]  # fmt: skip


def read_back(command):
    """The words that make hands to ``python -m experiments``."""
    words = command.replace("make ", "make -n --no-print-directory ", 1)
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, check=True, env=OUTSIDE)
    [line] = [line for line in done.stdout.splitlines() if "setup.sh" not in line]
    show = line.replace(".venv/bin/python -m experiments ", "printf '%s\\0' ", 1)
    return subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


@pytest.mark.parametrize("value", HARD)
def test_values_come_through_two_shells_and_make(value):
    arguments = [f"--data.prompt={value}", "--trainer.max_steps", "5"]
    ask = make_command("ask", {"EXP": "x", "SEED": 3}, arguments)
    assert read_back(ask) == ["ask", "x", "--seed", "3", *arguments]
    evaluate = make_command("evaluate", {"EXP": "x", "CKPT": value}, arguments)
    assert read_back(evaluate) == ["evaluate", "x", "--checkpoint", value, *arguments]


def test_a_stage_names_other_commands_over_its_own_run(monkeypatch):
    arguments = ["--data.prompt=it's $5"]
    made = make_command("train", {"EXP": "x", "SEED": 3, "RESUME": "last"}, arguments)
    monkeypatch.setenv(COMMAND_VARIABLE, made)
    assert read_back(same_run("metrics")) == ["metrics", "x", *arguments]
    resumed = ["train", "x", "--seed", "3", "--resume", "last", *arguments]
    assert read_back(same_run("train", "SEED", "RESUME")) == resumed
