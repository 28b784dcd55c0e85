"""Rows of an agent program: joined or one per turn, in several conversations, the loss is the same."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from lightning_modules.algorithms.arpo import ARPO
from lightning_modules.algorithms.dgpo import DGPO
from lightning_modules.algorithms.episode_grpo import GiGPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.algorithms.sod import SOD
from lightning_modules.batch import LogprobBatch, collate
from lightning_modules.maths.losses import group_advantages
from rollout.trajectory import Trajectory, split_turns
from tests.lightning_modules.helpers import fit, largest_difference, make_group


def apart(t: Trajectory) -> Trajectory:
    """The same turns with a prompt each, as if every request of a program were a row."""
    turns, ids, logprobs, at = [], [], [], 0
    for turn in t.turns:
        span = slice(turn.start, turn.end)
        ids += t.response_ids[span]
        logprobs += t.logprobs[span]
        end = at + turn.end - turn.start
        prompt = (*t.prompt_ids, *t.response_ids[: turn.start])
        turns.append(dataclasses.replace(turn, start=at, end=end, observation_end=end, prompt_ids=prompt))
        at = end
    return t.replace(response_ids=tuple(ids), loss_mask=(1,) * at, logprobs=tuple(logprobs), turns=tuple(turns))


def together(a: Trajectory, b: Trajectory) -> Trajectory:
    """One rollout with two conversations, those of ``a`` and ``b``; its reward is that of ``a``."""
    turns = [dataclasses.replace(turn, prompt_ids=a.prompt_ids if k == 0 else None) for k, turn in enumerate(a.turns)]
    shift = len(a.response_ids)
    for k, turn in enumerate(b.turns):
        ends = {"end": turn.end + shift, "observation_end": turn.observation_end + shift}
        own = b.prompt_ids if k == 0 else None
        turns.append(dataclasses.replace(turn, start=turn.start + shift, prompt_ids=own, **ends))
    joined = {name: getattr(a, name) + getattr(b, name) for name in ("response_ids", "loss_mask", "logprobs")}
    return a.replace(turns=tuple(turns), **joined)


@pytest.fixture
def groups():
    """Two groups of three rollouts; one of each has two conversations."""
    rng = random.Random(3)
    made = []
    for name in "ab":
        *group, other = make_group(rng, name, [1.0, 0.0, 0.5, 0.0])
        made += [*group[:2], together(group[2], other.replace(index=2))]
    return made


def test_a_row_begins_at_each_conversation(groups):
    rows = [row for t in groups for row in split_turns(t)]
    assert [(row.group, row.index, row.row) for row in rows[:4]] == [
        ("a", 0, None),
        ("a", 1, None),
        ("a", 2, 0),
        ("a", 2, 3),
    ]
    whole, first, second = groups[2], rows[2], rows[3]
    assert first.response_ids + second.response_ids == whole.response_ids
    assert second.prompt_ids == whole.turns[3].prompt_ids and second.turns[0].start == 0
    between = [turn.observation_end - turn.end for turn in whole.turns]
    assert [turn.observation_end - turn.end for turn in (*first.turns, *second.turns)] == between


@pytest.mark.parametrize("method", ["grpo", "opd"])
def test_one_row_per_turn_gives_the_same_loss_and_gradient(method, groups, model_dir, teacher_dir):
    def gradients(trajectories):
        if method == "grpo":
            module = GRPO(str(model_dir), reference=str(teacher_dir), kl_coef=0.1, entropy_coef=0.01, **once)
        else:
            module = SOD(str(model_dir), teacher=str(model_dir), opd_mode="uniform", **once)
        kept = {}
        module.on_before_optimizer_step = lambda optimizer: kept.update(
            (name, p.grad.clone()) for name, p in module.policy.named_parameters()
        )
        figures = fit(module, [trajectories]).callback_metrics
        return kept, float(figures["train/loss_policy"])

    once = {"num_mini_batches": 1, "max_grad_norm": 1e9, "lr": 1e-3}
    (joined, loss), (single, other) = gradients(groups), gradients([apart_all(t) for t in groups])
    assert joined and max(float(g.abs().max()) for g in joined.values()) > 1e-3
    assert largest_difference(joined, single) < 1e-6 and loss == pytest.approx(other, abs=1e-6)


def apart_all(t: Trajectory) -> Trajectory:
    """`apart` of a rollout with one or two conversations."""
    if t.turns[0].prompt_ids is None:
        return apart(t)
    first, second = (apart(row.replace(turns=tuple(dataclasses.replace(x, prompt_ids=None) for x in row.turns)))
                     for row in split_turns(t))  # fmt: skip
    shift = len(first.response_ids)
    moved = [
        dataclasses.replace(x, start=x.start + shift, end=x.end + shift, observation_end=x.observation_end + shift)
        for x in second.turns
    ]
    joined = {name: getattr(first, name) + getattr(second, name) for name in ("response_ids", "loss_mask", "logprobs")}
    return t.replace(turns=(*first.turns, *moved), **joined)


def test_a_rollout_counts_once_in_its_group_whatever_its_rows(groups):
    module = GRPO("unused")
    rows = [row for t in groups for row in split_turns(t)]
    batch = collate(rows)
    found = module.outcome_advantages(rows, batch, LogprobBatch(torch.zeros_like(batch.mask))).amax(1)
    low = module.outcome_advantages(rows, batch, LogprobBatch(torch.zeros_like(batch.mask))).amin(1)
    by_hand = {1.0: 0.5 / (0.5 + 1e-6), 0.0: -0.5 / (0.5 + 1e-6), 0.5: 0.0}  # of 1, 0 and 0.5: mean 0.5, std 0.5
    for row, high, least in zip(rows, found.tolist(), low.tolist(), strict=True):
        assert high + least == pytest.approx(by_hand[row.reward.total], abs=1e-6)


def test_members_by_hand():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert group_advantages(rewards, list("aaaa"), "centred", members=[0, 0, 0, 1]).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert group_advantages(rewards, list("aaaa"), "centred").tolist() == [0.25, 0.25, 0.25, -0.75]
    assert group_advantages(rewards[:3], list("aaa"), "std", "reward", members=[5, 5, 5]).tolist() == [1.0, 1.0, 1.0]
    order = torch.tensor([3, 0, 2, 1])
    mixed = group_advantages(rewards[order], list("aaaa"), "leave_one_out", members=[1, 0, 0, 0])
    assert mixed.tolist() == [-1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("method", ["ppo", "dgpo"])
def test_a_critic_reads_each_conversation(method, groups, model_dir, teacher_dir):
    options = {"critic_lr": 1e-3, "lr": 1e-3, "num_mini_batches": 1}
    if method == "ppo":
        module = PPO(str(model_dir), **options)
    else:
        module = DGPO(str(model_dir), str(teacher_dir), kl_coef=0.1, **options)
    figures = fit(module, [groups]).callback_metrics
    assert float(figures["train/grad_norm"]) > 0 and torch.isfinite(figures["train/loss_value"])


def test_sods_weights_compare_the_turns_of_each_conversation(groups, model_dir, teacher_dir):
    module = SOD(str(model_dir), teacher=str(model_dir), lr=1e-3)
    fit(module, [groups])
    program = SimpleNamespace(rollouts=SimpleNamespace(program=object(), protocol=None, budgets=None))
    SOD("p", "t").check_data(program)
    for refused, why in ((GiGPO("p"), "GiGPO compares states"), (ARPO("p", "hard"), "HardAttribution shares tokens")):
        with pytest.raises(ValueError, match=why):
            refused.check_data(program)
