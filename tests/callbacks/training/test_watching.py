"""Throughput and progress."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch

from callbacks.tracking.run_info import duration
from callbacks.training.progress import Progress, figures
from callbacks.training.throughput import Throughput
from common.progress_reports import MARK
from common.progress_reports import Progress as Progressed
from rollout.trajectory import ActionKind
from tests.callbacks.helpers import Hands, Trajectories, make_trajectory


class Clock:
    """Goes on only where something takes time on purpose: how busy the machine is shows in no figure."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("callbacks.training.throughput.time", CLOCK)


class SlowTrajectories(Trajectories):
    """Takes 60 ms to make each batch, as a rollout would."""

    def __iter__(self):
        for batch in self.batches:
            CLOCK.sleep(0.06)
            yield batch


class Scripted(Hands):
    """Logs given metrics, one dictionary an iteration; 30 ms a step."""

    def __init__(self, metrics, batch=None, loader=SlowTrajectories):
        super().__init__()
        self.metrics, self.batch, self.loader = metrics, batch or [make_trajectory()], loader
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return self.loader([self.batch] * len(self.metrics))

    def val_dataloader(self):
        return Trajectories([[make_trajectory()]])

    def validation_step(self, batch, batch_idx):
        CLOCK.sleep(0.2)

    def training_step(self, batch, batch_idx):
        if self.loader is SlowTrajectories:
            CLOCK.sleep(0.03)
        self.optimizers().step()
        self.log_dict(self.metrics[batch_idx], batch_size=1)


class Timed(L.Callback):
    """Stands for WeightSync: 20 ms after each iteration and in each validation."""

    phase, seconds = "sync", 0.0

    def on_train_batch_end(self, *args):
        CLOCK.sleep(0.02)
        self.seconds += 0.02

    def on_validation_start(self, *args):
        self.on_train_batch_end()


class Keep(L.Callback):
    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, *args):
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items()})


@pytest.mark.parametrize("order", [0, 1], ids=["timed-last", "timed-first"])
def test_phases_add_up_and_validation_is_in_none_of_them(trainer_for, clock, order):
    keep, timed, throughput = Keep(), Timed(), Throughput()
    callbacks = [throughput, timed, keep] if order == 0 else [timed, throughput, keep]
    batch = [make_trajectory(kinds=(ActionKind.ANSWER,)), make_trajectory()]  # 4 and 8 sampled tokens, 4 + 11 in all
    module = Scripted([{}] * 4, batch)
    trainer_for(callbacks, max_epochs=1, val_check_interval=2).fit(module)
    for i, row in enumerate(keep.rows):
        assert row["time/train"] == pytest.approx(0.03)
        assert row["time/rollout"] == pytest.approx(0.06), "what the loader takes, not the 200 ms of the validation"
        # A push at the start of a validation is part of it, unless it comes before Throughput has heard of it.
        pushes = (0, 1, 1 + order, 1)[i]
        assert row["time/sync"] == pytest.approx(pushes * 0.02, abs=1e-6)
        seconds = row["time/train"] + row["time/rollout"] + row["time/sync"]
        assert row["throughput/trajectories_per_s"] == pytest.approx(2 / seconds, rel=1e-3)
        assert row["throughput/tokens_per_s"] == pytest.approx((8 + 4 + 8 + 11) / seconds, rel=1e-3)
        assert row["throughput/rollout_tokens_per_s"] == pytest.approx(12 / row["time/rollout"], rel=1e-3)


class Generated(L.LightningDataModule):
    """Says that each batch took 2 s to generate, 60 ms of which the trainer waits for."""

    generation_s = 2.0

    def train_dataloader(self):
        return SlowTrajectories([[make_trajectory()]] * 2)


def test_what_of_the_generation_was_hidden(trainer_for, clock):
    keep = Keep()
    trainer_for([Throughput(), keep], max_epochs=1, limit_val_batches=0).fit(Scripted([{}] * 2), datamodule=Generated())
    for row in keep.rows:
        assert row["time/generation"] == pytest.approx(2.0)
        assert row["time/rollout"] == pytest.approx(0.06)
        assert row["throughput/hidden_generation"] == pytest.approx(1 - 0.06 / 2.0)
        assert row["throughput/rollout_tokens_per_s"] == pytest.approx(8 / 2.0)


def test_supervised_batches_wait_for_data_not_for_rollouts(trainer_for, clock):
    keep = Keep()
    trainer_for([Throughput(on_policy=False), keep], max_epochs=1).fit(Scripted([{}]))
    assert keep.rows[0]["time/data"] == pytest.approx(0.06) and "time/rollout" not in keep.rows[0]
    assert "throughput/rollout_tokens_per_s" not in keep.rows[0]


# --- progress ---------------------------------------------------------------------------------------------------------


def test_figures_and_durations():
    metrics = {"train/em": torch.tensor(0.25), "train/kl": 0.5, "throughput/tokens_per_s": 12345.6, "other": 1}
    assert figures(metrics) == ["em 0.250", "kl 0.500", "tok/s 12,346"]
    assert figures({"train/loss": 2.0, "train/kl": 0.1}) == ["loss 2.000", "kl 0.100"]
    assert figures({"train/loss": 2.0, "train/reward": 0.1}) == ["reward 0.100", "loss 2.000"], "the more telling first"
    own = {"train/loss": 2.0, "train/mine": 0.5, "train/yours": 0.7}
    assert figures(own, ["train/mine", "train/loss"]) == ["loss 2.000", "train/mine 0.500"], "logged with prog_bar"
    played = {"train/success": 0.5, "train/em": 0.0, "val/em": 0.0, "val/reward/success": 0.25}
    assert figures(played) == ["success 0.500", "val success 0.250"], "its tasks have no answers"
    seconds = (3.21, 250, 7500, math.nan)
    assert [duration(s) for s in seconds] == ["3.2 s", "4 min 10 s", "2 h 05 min", "?"]


def test_the_sanity_check_of_a_validation_is_no_phase(trainer_for, capfd, monkeypatch):
    class RollsOut(L.Callback):
        def on_validation_batch_start(self, trainer, *_):
            trainer.progress_bar_callback.rolled_out(1, 2)

    monkeypatch.setattr("common.progress_reports.EVERY_S", 0.0)
    trainer = trainer_for([Progress(), RollsOut()], max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Scripted([{"train/em": 0.1}], loader=Trajectories))
    found = [Progressed.parse(line) for line in capfd.readouterr().err.encode().splitlines() if line[:1] == MARK]
    assert [(p.phase, p.done) for p in found if p.phase != "train"] == [
        ("validate", 0.0), ("validate", 0.5), ("validate", 1.0)
    ]  # fmt: skip


def test_progress_is_reported_by_phase(trainer_for, capfd, monkeypatch):
    monkeypatch.setattr("common.progress_reports.EVERY_S", 0.0)
    metrics = [{"train/em": 0.1 * i} for i in range(4)]
    trainer = trainer_for([Progress()], max_epochs=1, val_check_interval=2)
    trainer.fit(Scripted(metrics, loader=Trajectories))
    found = [Progressed.parse(line) for line in capfd.readouterr().err.encode().splitlines() if line[:1] == MARK]
    assert [(p.phase, p.done) for p in found] == [
        ("train", 0.0), ("train", 0.25), ("train", 0.5), ("validate", 0.0), ("validate", 1.0),
        ("train", 0.75), ("train", 1.0), ("validate", 0.0), ("validate", 1.0),
    ]  # fmt: skip
    assert found[1].figures == ("em 0.000", "iteration 1") and math.isnan(found[0].eta_s)
    assert found[1].eta_s == pytest.approx(3 * found[1].seconds), "three quarters to go at this pace"
