"""``make experiments``: a screen of 80 columns cuts its lines, a pipe does not; a filter leaves what it says."""

import re

import pytest

from experiments.commands.cli import main
from experiments.commands.experiments import NEWCOMERS, print_table
from experiments.registry.compose import resolve
from experiments.registry.definitions import definitions
from experiments.registry.listing import load, names, summary
from experiments.registry.project import Project


def lines(capsys, *words):
    assert main(["list", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_screen_cuts_lines_and_a_pipe_gets_them_whole(capsys, monkeypatch):
    rows = [("name", "what"), ("a", "x" * 100), ("long_name", "short")]
    print_table(rows)
    whole = ["name       what", f"a          {'x' * 100}", "long_name  short"]
    assert capsys.readouterr().out.splitlines() == whole
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(rows)
    assert capsys.readouterr().out.splitlines() == [whole[0], f"{whole[1][:77]}...", whole[2]]


def test_no_experiment_shows_a_placeholder():
    blocks = {
        name: entry.config.get("experiment") or {} for name, entry in definitions(Project().experiment_dirs).items()
    }
    open_ends = {name: text for name, block in blocks.items() if re.search("<[^<>]*>", text := str(block))}
    assert len(blocks) > 500 and not open_ends
    assert blocks["released_sod_qwen3_0.6b"]["reproduces"] == "SOD row, average 24.22"


def test_without_a_filter_a_line_for_each_family(capsys):
    shown = lines(capsys)
    assert shown[:5] == NEWCOMERS.splitlines() and shown[0].startswith("New here?") and max(map(len, shown[:5])) <= 80
    named = re.findall("EXP=([^ ]+)", NEWCOMERS)
    assert len(named) == 3 and set(named) <= set(names(Project())), "they are experiments"
    rows = [line.split() for line in shown[5:] if line and not line.startswith(("family", "One", "Run", "What"))]
    assert {"tiny/dgpo", "dgpo", "sod", "sdar", "arpo", "quick/smoke"} <= {row[0] for row in rows}
    assert next(row for row in rows if row[0] == "tiny")[-2:] == ["SFT,", "expert"], "of every kind of stage"
    assert sum(int(row[1]) for row in rows) == len(names(Project()))


def test_the_mlflow_experiment_is_the_family():
    config = resolve(load("sod_tiny", Project()), lambda name: name)
    assert config["trainer"]["logger"]["init_args"]["experiment_name"] == config["experiment"]["family"]
    assert summary("sod_tiny", Project()).family == config["experiment"]["family"] != ""
    smoke = {summary(name, Project()).family for name in ("smoke", "smoke_sft", "smoke_start")}
    assert smoke == {"quick/smoke"}, "one of a table's experiments may have its name"


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["--hardware", "cpu", "--algorithm", "SDAR"], {"sdar_tiny"}, {"sdar_qwen3_1.7b_search", "grpo_tiny"}),
    ],
)
def test_a_filter_leaves_a_line_for_each_experiment(capsys, words, some, none):
    found = {line.split()[0] for line in lines(capsys, *words) if line}
    assert some <= found and not none & found


def test_a_filter_that_leaves_nothing_is_an_error_with_the_nearest(capsys):
    assert main(["list", "--algorithm", "GRPPO"]) == 2
    assert "no experiment of" in (said := capsys.readouterr().err) and "did you mean 'GRPO'" in said
