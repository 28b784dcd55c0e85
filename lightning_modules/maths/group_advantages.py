"""Advantages from comparing the trajectories of one prompt: torch only, no gradient.

A group is all trajectories of one prompt.  It never spans ranks, so nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Convention = Literal["std", "centred", "leave_one_out"]
Lone = Literal["zero", "reward"]
Member = tuple[str, int]  # (group, index in the group)

STD_EPS = 1e-6  # verl's epsilon; TRL takes 1e-4


def members_of(groups: Sequence[str]) -> dict[str, list[int]]:
    """By group, the rows that belong to it, in order.

    >>> members_of(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return rows


def group_advantages(
    rewards_B: Tensor, groups: Sequence[str], convention: Convention = "std", lone: Lone = "zero"
) -> Tensor:
    """How much better each trajectory is than the others of its group [B].

    ===============  ==========================================  ==============================
    convention       advantage                                   rewards [1, 0, 0, 1] become
    ===============  ==========================================  ==============================
    std              (r - mean) / (unbiased std + 1e-6)          +-0.866   GRPO in verl, Search-R1
    centred          r - mean                                    +-0.5     Dr. GRPO (arXiv 2503.20783)
    leave_one_out    r - mean of the others                      +-0.667   RLOO (arXiv 2402.14740)
    ===============  ==========================================  ==============================

    Equal rewards give exactly 0, however they round.  Computed in float64.

    Args:
        rewards_B: outcome of each trajectory.
        groups: group of each trajectory.
        convention: see above.
        lone: a group of one has nothing to be compared with.  ``zero``: it teaches nothing.  ``reward``: the reward
            is the advantage (verl, which takes mean 0 and std 1 there), so that with non-negative rewards what was
            sampled is pushed up, good or bad.

    Raises:
        ValueError: unknown convention.
    """
    if convention not in ("std", "centred", "leave_one_out"):
        raise ValueError(f"unknown group advantage '{convention}'; expected std, centred or leave_one_out")
    advantages = torch.zeros_like(rewards_B)
    for rows in members_of(groups).values():
        rewards = rewards_B[rows].double()
        n = len(rows)
        if n == 1:
            advantages[rows] = rewards_B[rows] if lone == "reward" else 0.0
        elif rewards.max() > rewards.min():
            scale = {"std": 1.0 / (rewards.std() + STD_EPS), "centred": 1.0, "leave_one_out": n / (n - 1)}[convention]
            advantages[rows] = ((rewards - rewards.mean()) * scale).to(advantages.dtype)
    return advantages


def zero_variance_groups(rewards_B: Tensor, groups: Sequence[str]) -> int:
    """How many groups hold no comparison: equal rewards, or a single trajectory."""
    return sum(bool((rewards_B[rows] == rewards_B[rows[0]]).all()) for rows in members_of(groups).values())


def shared_token_advantages(
    advantages_BT: Tensor,
    prompt_lengths: Sequence[int],
    members: Sequence[Member],
    forks: Mapping[Member, tuple[int, int]],
) -> Tensor:
    """Give tokens that d trajectories have in common the mean advantage of those d (ARPO's hard attribution)::

        A_t = 1/d sum_i A_i,t       over the trajectories i that share token t by forking; their own A elsewhere

    A branch shares with its parent the response tokens before its fork, and so with all that share these with the
    parent: forks may be nested.  Trajectories that merely happen to begin with the same tokens share nothing.
    Each copy keeps its place in the loss, so that a token shared by d trajectories still weighs d times.

    Args:
        advantages_BT: advantage of each token, aligned with positions (see batch.py).
        prompt_lengths: of each row; equal within a group.
        members: (group, index) of each row.
        forks: by (group, index), the parent's index and the response offset up to which the tokens are the parent's.
            Trajectories that are not among the rows (they failed) may stand here, so that lines of descent through
            them are known; they add nothing to the mean.

    Raises:
        ValueError: a trajectory descends from itself.
    """
    length = advantages_BT.shape[1]
    names: dict[Member, int] = {}
    origin_BT = torch.zeros(advantages_BT.shape, dtype=torch.int64)  # which trajectory sampled the token first
    for row, (member, start) in enumerate(zip(members, prompt_lengths, strict=True)):
        ancestor, end, line = member, length, [member]
        origin_BT[row] = names.setdefault(member, len(names))
        while ancestor in forks:
            parent, at = forks[ancestor]
            ancestor, end = (member[0], parent), min(end, start + at)
            if ancestor in line:
                raise ValueError(f"trajectory {member[0]}/{parent} is its own ancestor by its forks")
            line.append(ancestor)
            origin_BT[row, :end] = names.setdefault(ancestor, len(names))
    token_BT = (origin_BT * length + torch.arange(length)).to(advantages_BT.device)  # one number per distinct token
    sums = advantages_BT.new_zeros(len(names) * length)
    counts = sums.clone()
    sums.index_add_(0, token_BT.flatten(), advantages_BT.flatten())
    counts.index_add_(0, token_BT.flatten(), torch.ones_like(advantages_BT).flatten())
    return (sums / counts.clamp(min=1.0))[token_BT]
