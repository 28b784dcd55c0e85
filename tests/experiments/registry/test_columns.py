"""Which columns the commands show: those of the experiment's file."""

from __future__ import annotations

from types import SimpleNamespace

from experiments.commands.outputs import chosen_metrics
from experiments.registry.keys import semantic


def test_compare_adds_the_metrics_behind_chosen_columns(workshop):
    workshop.task("plain")
    workshop.task("chosen", about="columns: [em, tool_calls, train_forked, train_trajectories]")
    request = SimpleNamespace(project=workshop.project)
    assert chosen_metrics(["plain", "chosen", "chosen*", "gone"], request) == [
        "val/em", "test/em", "val/tool_calls", "test/tool_calls", "train/forked",
    ]  # fmt: skip
    assert chosen_metrics([], request) == []


def test_columns_are_outside_the_key_and_inherited(workshop):
    workshop.task("one")
    before = workshop.graph("one").target()
    workshop.task("one", about="columns: [em]")
    workshop.write("two", "inherits: [one]")
    after = workshop.graph("one").target()
    assert before.key == after.key
    assert workshop.graph("two").target().config["experiment"]["columns"] == ["em"]


def test_shipped_on_policy_runs_keep_totals_that_do_not_change_their_keys(shipped):
    stage = shipped.stage("ppo_tiny")
    path = "callbacks.training.training_totals.TrainingTotals"
    assert path in [c["class_path"] for c in stage.config["trainer"]["callbacks"]]
    assert path not in [c["class_path"] for c in semantic(stage.config)["trainer"]["callbacks"]]
