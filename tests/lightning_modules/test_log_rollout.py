"""What a training step logs about its rollouts."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from lightning_modules import metrics as metrics_module
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.metrics import StepMetrics
from lightning_modules.training.rollout_metrics import log_rollout
from rollout.trajectory import CallOutcome, Fork, Reward, RewardError, StopReason, ToolCall, ToolRequest, ToolResult
from tests.lightning_modules.helpers import fit, make_trajectory


def call(turn, tool="search", outcome=CallOutcome.OK):
    return ToolCall(turn, ToolRequest(tool, {}), ToolResult("", outcome), 0.0)


def group(name="g"):
    """A root that calls two tools, a fork that inherits the first call, and one that failed. Turns: 4 + 3, 4 + 3, 4."""
    made = [make_trajectory(random.Random(i), i, spans=[4, 3, 4, 3, 4]) for i in range(3)]
    turns = [dataclasses.replace(t, entropy=0.5 + i) for i, t in enumerate(made[0].turns)]
    root = made[0].replace(
        group=name, index=0, calls=(call(0), call(1, "python", CallOutcome.ERROR)), reward=Reward(1.0, {"math": 1.0}),
        turns=(*turns[:2], dataclasses.replace(turns[2], branch_probability=0.75)), tokens_computed=50,
    )  # fmt: skip
    fork = made[1].replace(
        group=name, index=1, calls=(call(0), call(1, "python", CallOutcome.EMPTY)), reward=Reward(0.0, {"format": 0.5}),
        fork=Fork(0, 7), tokens_computed=20,
    )  # fmt: skip
    failed = made[2].replace(group=name, index=2, stop_reason=StopReason.INFRASTRUCTURE, reward=None, calls=(call(0),))
    return [root, fork, failed]


EXPECTED = {
    "train/trajectories": 2, "train/tool_calls": 3, "train/calls/search": 1, "train/calls/python": 2,
    "train/distinct": 1.0, "train/branch_probability": 0.75, "train/forked": 0.5, "train/inherited_tokens": 7 / 36,
    "train/tokens_computed": 35.0, "train/entropy_after_tools": (1.5 + 2.5) / 2, "train/call_outcome/ok": 1 / 3,
    "train/call_outcome/error": 1 / 3, "train/call_outcome/empty": 1 / 3,
    "train/call_outcome/timeout": 0.0, "train/call_outcome/refused": 0.0, "train/reward": 0.5,
    "train/reward/math": 1.0, "train/reward/format": 0.5, "train/stop/answer": 1.0, "train/zero_variance_groups": 0.0,
}  # fmt: skip


def test_figures_by_hand():
    metrics = StepMetrics()
    log_rollout(metrics, group())
    found = metrics.reduce()
    assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    never = "eos max_turns length environment_done program_done program_failed program_timeout".split()
    others = {f"train/stop/{reason}" for reason in never}
    assert set(found) - set(EXPECTED) == others and not any(found[name] for name in others)


def test_two_ranks_log_what_one_would(monkeypatch):
    """Rank 1 has another group, without a Python call."""
    a, b = group("a"), [t.replace(calls=t.calls[:1]) for t in group("b")]
    together, *ranks = StepMetrics(), StepMetrics(), StepMetrics()
    for metrics, trajectories in zip((together, *ranks), ([*a, *b], a, b), strict=True):
        log_rollout(metrics, trajectories)
        metrics.deviation("spread", torch.tensor([float(len(t.calls)) + 7 for t in trajectories]))
    parts = []
    monkeypatch.setattr(metrics_module.ranks, "gather_objects", lambda mine: parts.append(mine) or parts)
    ranks[0].reduce()
    merged = ranks[1].reduce()
    monkeypatch.setattr(metrics_module.ranks, "gather_objects", lambda mine: [mine])
    assert merged == pytest.approx(together.reduce())
    calls = torch.tensor([float(len(t.calls)) for t in (*a, *b)])
    assert merged["spread"] == pytest.approx(calls.std(unbiased=False).item()) and merged["spread"] > 0
    assert merged["train/calls/python"] == 2 and merged["train/trajectories"] == 4


def test_a_group_of_one_says_nothing_about_groups(model_dir):
    rows = [t for i in range(2) for t in group(f"g{i}")[:1]]
    trainer = fit(PPO(str(model_dir), num_mini_batches=1), [rows])
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["train/tool_calls"] == 4 and logged["train/forked"] == 0.0
    assert logged["train/reward"] == logged["train/reward/math"] == 1.0
    assert "train/distinct" not in logged


def test_a_part_of_the_reward_changes_no_other_metric():
    parts = {"reward": 9.0, "em": 1.0, "tool_calls": 9.0, "loss": 9.0}
    metrics = StepMetrics()
    log_rollout(metrics, [t.replace(reward=Reward(0.25, parts)) for t in group()[:1]])
    found = metrics.reduce()
    assert found["train/reward"] == 0.25 and found["train/em"] == 1.0 and found["train/tool_calls"] == 2
    assert found["train/reward/reward"] == found["train/reward/loss"] == 9.0 and "train/loss" not in found
    with pytest.raises(RewardError, match="a part is called total"):
        Reward(0.25, {"total": 9.0})
