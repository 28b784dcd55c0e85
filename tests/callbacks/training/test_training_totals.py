"""Totals of a training: by hand, over ranks' parts, and over a kill."""

from __future__ import annotations

import json
from types import SimpleNamespace

import lightning as L
import pytest

from callbacks.training import training_totals
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from callbacks.training.training_totals import TrainingTotals
from experiments.reports.results import read_training
from rollout.trajectory import Fork, StopReason
from rollout.trajectory_metrics import rollout_metrics
from tests.callbacks.helpers import Trajectories, make_call, make_trajectory
from tests.callbacks.training.test_watching import Scripted


def batch(reward: float, calls: int = 1):
    """A group of two: a root with calls, and its fork, which inherits the first of them."""
    made = tuple(make_call(0, "q", ("x",)) for _ in range(calls))
    root = make_trajectory(calls=made, reward=reward).replace(tokens_computed=30)
    fork = make_trajectory(calls=made, reward=0.0, index=1).replace(fork=Fork(0, 7), tokens_computed=10)
    failed = make_trajectory(index=2, stop=StopReason.INFRASTRUCTURE, reward=1.0, calls=made)
    return [root, fork, failed]


class Position(Trajectories):
    """Goes on where its state says."""

    position = 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Batches(Scripted):
    """A rollout batch of another reward each iteration."""

    def __init__(self, batches, crash_at=None):
        super().__init__([{}] * len(batches), loader=Trajectories)
        self.batches, self.crash_at = batches, crash_at

    def train_dataloader(self):
        return Position(self.batches)

    def val_dataloader(self):
        return []

    def training_step(self, given, batch_idx):
        if batch_idx == self.crash_at:
            raise RuntimeError("the machine was switched off")
        self.optimizers().step()


def test_sums_and_means_by_hand(trainer_for, tmp_path):
    batches = [batch(1.0, calls=3)] + [batch(0.1 * i) for i in range(11)]
    trainer_for([TrainingTotals()], max_epochs=1).fit(Batches(batches))
    found = read_training(tmp_path / "stage")
    assert found["iterations"] == 12 and found["trajectories"] == 24
    assert found["tool_calls"] == found["calls/search"] == 3 + 11, "inherited ones once"
    assert found["tokens_computed_total"] == 12 * 40 and found["tokens_computed"] == 20
    assert found["forked"] == 0.5 and found["distinct"] == 0.5, "the helper's ids are all the same"
    assert found["last_reward"] == pytest.approx(sum(0.1 * i for i in range(1, 11)) / 20), "the last ten only"
    assert "last_entropy_after_tools" not in found, "not recorded is not zero"


def test_a_resumed_run_ends_with_the_same_totals(trainer_for, tmp_path):
    batches = [batch(0.1 * i, calls=1 + i) for i in range(6)]
    straight, cut = tmp_path / "straight", tmp_path / "cut"

    def fit(folder, crash_at=None):
        trainer = trainer_for([TrainingTotals(), IterationCheckpoint()], default_root_dir=str(folder), max_epochs=1)
        checkpoint = find_checkpoint(folder)
        trainer.fit(Batches(batches, crash_at), ckpt_path=str(checkpoint) if checkpoint else None)

    fit(straight)
    with pytest.raises(RuntimeError, match="switched off"):
        fit(cut, crash_at=4)
    assert read_training(cut)["iterations"] == 4
    fit(cut)
    expected, found = read_training(straight), read_training(cut)
    assert found.pop("seconds") >= 0 and expected.pop("seconds") >= 0
    assert found == expected and found["iterations"] == 6


def test_ranks_are_added_up(monkeypatch, tmp_path):
    other = rollout_metrics(batch(1.0, calls=2))
    monkeypatch.setattr(training_totals, "gather_objects", lambda mine: [mine, (other, other)])
    data = SimpleNamespace(discarded=batch(0.0))  # by dynamic sampling: paid for, and in no other figure
    trainer = SimpleNamespace(is_global_zero=True, default_root_dir=str(tmp_path), datamodule=data)
    totals = TrainingTotals()
    totals.on_train_batch_end(trainer, L.LightningModule(), None, batch(0.0), 0)
    totals.on_train_batch_end(trainer, L.LightningModule(), None, "a supervised batch", 1)
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["trajectories"] == 4 and found["discarded_trajectories"] == 4 and found["iterations"] == 1
    assert found["tool_calls"] == 2 * 3
