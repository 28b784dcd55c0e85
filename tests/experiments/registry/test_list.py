"""``make experiments``: every line fits a screen of 80 columns, a filter leaves what it says."""

import pytest

from experiments.commands.cli import main
from experiments.registry.compose import resolve
from experiments.registry.listing import load, names, summary
from experiments.registry.project import Project


def lines(capsys, *words):
    assert main(["list", *words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80, max(out, key=len)
    return out


def test_without_a_filter_a_line_for_each_family(capsys):
    rows = [line.split() for line in lines(capsys) if line and not line.startswith(("family", "One", "Run"))]
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
        (["--like", "SOD_"], {"sod_qwen3_0.6b", "sod_tiny"}, {"dgpo_tiny", "opd_tiny"}),
        (["--algorithm", "grpo"], {"grpo_tiny", "grpo_qwen2.5_7b_search"}, {"grpo_opsd_tiny", "sod_tiny"}),
        (["--hardware", "cpu", "--algorithm", "SDAR"], {"sdar_tiny"}, {"sdar_qwen3_1.7b_search", "grpo_tiny"}),
    ],
)
def test_a_filter_leaves_a_line_for_each_experiment(capsys, words, some, none):
    found = {line.split()[0] for line in lines(capsys, *words) if line}
    assert some <= found and not none & found


def test_a_filter_that_leaves_nothing_is_an_error_with_the_nearest(capsys):
    assert main(["list", "--algorithm", "GRPPO"]) == 2
    assert "none of the" in (said := capsys.readouterr().err) and "did you mean 'GRPO'" in said
