"""The rules by which a collapse is noticed, and what the guard does then."""

from __future__ import annotations

import json
import math

import pytest
from lightning.pytorch import Callback, Trainer

from callbacks.training.collapse_guard import CALLS, CollapseDetector, CollapseGuard, action_counts
from rollout.storage import load_trajectories
from rollout.trajectory import ActionKind, StopReason
from tests.callbacks.helpers import Trajectories, make_trajectory
from tests.callbacks.training.test_watching import Keep, Scripted


def test_a_drop_below_the_maximum_needs_patience_in_a_row_and_a_maximum_above_the_floor():
    rule = CollapseDetector(0.5, patience=3, window=None, warmup=0, floor=0.1)
    assert [rule.update(v) for v in (0.4, 0.19, 0.19, 0.21, 0.19, 0.1)] == [None] * 6
    assert rule.update(0.0) == "below 50% of its maximum 0.4 for 3 iterations, now 0"
    noise = CollapseDetector(0.5, patience=3, window=None, warmup=0, floor=0.1)
    assert [noise.update(v) for v in (0.09, 0.0, 0.0, 0.0, 0.0)] == [None] * 5


def test_a_rise_is_compared_with_calm_times_and_catches_nan_at_once():
    rule = CollapseDetector(factor=3.0, patience=2, window=20, warmup=5)
    assert [rule.update(v) for v in (100.0, 1.0, 1.1, 0.9, 1.0, 1.0)] == [None] * 6  # too early to judge
    assert [rule.update(v) for v in (3.2, 1.0, 3.2)] == [None] * 3
    assert rule.update(9.0) == "above 3 times its median 1 for 2 iterations, now 9"
    assert "not a finite number" in CollapseDetector(factor=3.0).update(math.nan)


def test_slow_decline_is_no_fall_and_a_fast_one_is():
    slow, fast = (CollapseDetector(0.6, patience=3, window=20, warmup=5) for _ in range(2))
    assert [slow.update(4.0 * 0.98**i) for i in range(200)] == [None] * 200, "a third less in twenty iterations"
    verdicts = [fast.update(4.0 * 0.93**i) for i in range(30)]
    assert any(verdicts), "half in ten iterations"


@pytest.mark.parametrize("level", [-0.5, 0.0, 3.0])
def test_slump_measures_rewards_of_any_sign_by_their_scatter(level):
    noise = [0.05, -0.05, 0.02, -0.02, 0.08, -0.08, 0.0] * 6
    calm = CollapseDetector(spreads=5.0, patience=3)
    assert [calm.update(level + n) for n in noise] == [None] * len(noise)
    assert [calm.update(level - 0.5 + n) for n in noise[:2]] == [None, None]
    assert "more than 5 spreads (0.0741) below its median" in calm.update(level - 0.5)
    constant = CollapseDetector(spreads=5.0, patience=1)
    assert [constant.update(level) for _ in range(20)] + [constant.update(level - 0.09)] == [None] * 21
    assert constant.update(level - 0.11) is not None, "a reward that never varied: 5 times the least spread"


# Tool calls per trajectory fall from 3.7 to 0.5 within 20 iterations (SOD's issue 24, docs/algorithms/sod.md), at once
# or after some calm ones.
@pytest.mark.parametrize("calm", [0, 15], ids=["from-the-start", "after-calm"])
def test_a_policy_that_unlearns_its_tool_is_noticed_early(trainer_for, tmp_path, calm):
    calls = [3.7] * calm + [3.7 + (0.5 - 3.7) * i / 20 for i in range(21)] + [0.5] * 10
    wobble = [0.05 if i % 2 else -0.05 for i in range(len(calls))]
    metrics = [
        {"train/tool_calls": 32 * (c + w), "train/trajectories": 32.0, "train/em": 0.3}
        for c, w in zip(calls, wobble, strict=True)
    ]
    guard, keep = CollapseGuard(stop=True), Keep()
    trainer = trainer_for([guard, keep], max_epochs=1, limit_val_batches=0)
    trainer.fit(Scripted(metrics, loader=Trajectories))
    assert list(guard.fired) == [CALLS] and calm + 8 <= trainer.global_step <= calm + 17
    assert guard.history[-1][CALLS] > 0.8, "while there was something left"
    assert keep.rows[0][CALLS] == pytest.approx(3.65)
    [evidence] = (tmp_path / "stage" / "collapse").glob("*.json")
    assert list(json.loads(evidence.read_text())["reasons"]) == [CALLS]


def test_entropy_may_neither_explode_nor_die():
    guard = CollapseGuard()
    for _ in range(15):
        assert not guard._judge({"train/entropy": 0.8})
    fallen = [guard._judge({"train/entropy": 0.1}) for _ in range(5)]
    assert fallen[:4] == [{}] * 4 and list(fallen[4]) == ["train/entropy (low)"]
    risen = [guard._judge({"train/entropy": 3.0}) for _ in range(5)]
    assert list(risen[4]) == ["train/entropy"]


def test_action_counts_leave_failures_out():
    invalid = make_trajectory(kinds=(ActionKind.INVALID, ActionKind.ANSWER))
    failed = make_trajectory(stop=StopReason.INFRASTRUCTURE)
    assert action_counts([invalid, make_trajectory(), failed]) == (3, 4)
    assert action_counts([]) == (0, 0)


def test_collapse_warns_once_keeps_evidence_and_stops(trainer_for, tmp_path, caplog):
    metrics = [{"train/em": em} for em in (0.1, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1)]
    batch = [make_trajectory("q1", kinds=(ActionKind.INVALID,))]
    guard, keep = CollapseGuard(patience=3), Keep()
    trainer = trainer_for([guard, keep], max_epochs=1, limit_val_batches=0)
    trainer.fit(Scripted(metrics, batch, Trajectories))
    assert trainer.global_step == 7, "without `stop` it only warns"
    assert caplog.text.count("may be collapsing") == 1 and "Training goes on" in caplog.text
    assert keep.rows[0]["train/valid_actions"] == 0.0
    folder = tmp_path / "stage" / "collapse"
    assert sorted(p.name for p in folder.iterdir()) == ["iteration-000005.json", "iteration-000005.parquet"]
    evidence = json.loads((folder / "iteration-000005.json").read_text())
    assert list(evidence["reasons"]) == ["train/em"] and len(evidence["history"]) == 5
    assert load_trajectories(folder / "iteration-000005.parquet") == batch

    stopped = trainer_for([CollapseGuard(patience=3, stop=True)], max_epochs=1, limit_val_batches=0)
    stopped.fit(Scripted(metrics, batch, Trajectories))
    assert stopped.global_step == 5


@pytest.mark.parametrize(("precision", "reports"), [("32-true", 1), ("16-mixed", 0)])
def test_a_gradient_that_overflows_in_float16_is_no_collapse(trainer_for, caplog, monkeypatch, precision, reports):
    monkeypatch.setattr(Trainer, "precision", precision)
    norms = [{"train/grad_norm": math.inf}] * 2
    trainer_for([CollapseGuard()], max_epochs=1, limit_val_batches=0).fit(
        Scripted(norms, [make_trajectory()], Trajectories)
    )
    assert caplog.text.count("may be collapsing") == reports


def test_a_run_that_was_stopped_is_not_trained_on_by_a_resume(trainer_for, tmp_path):
    metrics = [{"train/em": em} for em in (0.1, 0.4, *[0.1] * 8)]
    saved, batch = tmp_path / "stopped.ckpt", [make_trajectory()]

    class Save(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(saved)

    for stop, steps in ((True, 5), (False, 10)):
        trainer = trainer_for([CollapseGuard(patience=3, stop=True), Save()], max_epochs=1, limit_val_batches=0)
        trainer.fit(Scripted(metrics, batch, Trajectories))
        assert trainer.global_step == 5
        again = trainer_for([CollapseGuard(patience=3, stop=stop)], max_epochs=1, limit_val_batches=0)
        again.fit(Scripted(metrics, batch, Trajectories), ckpt_path=saved)
        assert again.global_step == steps


def test_guard_remembers_over_a_resume():
    guard = CollapseGuard(patience=3)
    for em in (0.4, 0.1, 0.1):
        guard.history.append({"train/em": em})
        guard._judge(guard.history[-1])
    again = CollapseGuard(patience=3)
    again.load_state_dict(guard.state_dict())
    assert again._judge({"train/em": 0.1}) == {"train/em": "below 50% of its maximum 0.4 for 3 iterations, now 0.1"}
