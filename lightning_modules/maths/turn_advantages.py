"""Advantages of the turns of an episode: torch only, float64 inside, no gradient.

A row is one turn of one trajectory, with its own prompt; [R] is rows. A trajectory is named by (group, member), a group
is all trajectories of one task and never spans ranks. The order of the rows does not matter.

Source: verl-agent's GRPO (docs/algorithms/grpo.md), GiGPO (arXiv 2505.10978, eq. 3 and 5 to 8), IGPO and AT2PO.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.maths.losses import STD_EPS, Singleton

Statistics = Literal["rows", "trajectories"]
TurnNorm = Literal["mean_norm", "mean_std_norm"]
Pool = Literal["separate", "joint"]
TreeWeighting = Literal["surprisal", "equal"]


def turn_advantages(
    returns_R: Tensor,
    penalties_R: Tensor,
    groups: Sequence[str],
    members: Sequence[int],
    statistics: Statistics = "rows",
    eps: float = STD_EPS,
    singleton: Singleton = "zero",
) -> Tensor:
    """Return the advantage of each turn [R]: its score relative to the scores of its group. This is GRPO as verl-agent
    runs it (docs/algorithms/grpo.md)::

        score = return - penalty        A = (score - mean) / (std + eps)        on every token of the turn

    ============  ================================================  ==========================================
    statistics    mean                                              variance
    ============  ================================================  ==========================================
    rows          of all rows of the group                          unbiased over rows (as released)
    trajectories  of the trajectories' mean scores                  n / (n - 1) times the mean over n trajectories
                                                                    of their mean (score - mean)^2
    ============  ================================================  ==========================================

    By rows, a trajectory weighs by its turns, so failures that ran to the limit dominate the mean. By trajectories,
    each weighs 1 whatever its length; without penalties these are mean and unbiased std of the returns. The variance
    includes differences within a trajectory: between trajectories it can be 0 while one turn was penalised, and that
    turn would get -penalty / eps. (The released switch takes the first row's score of each trajectory.)

    A group with equal scores gets exactly 0.

    Args:
        returns_R: return of the row's whole episode.
        penalties_R: penalty of each turn: coefficient times whether its action was invalid.
        groups: of each row.
        members: index in the group of each row's trajectory.
        statistics: see above.
        eps: added to the standard deviation.
        singleton: advantage of the only row (by trajectories: the only trajectory) of a group: zero, or reward, its
            score, as in verl (mean 0, std 1).

    Raises:
        ValueError: unknown statistics or singleton.
    """
    _check(statistics, singleton)
    device = returns_R.device
    ids, trajectories = _numbered(groups, device), _numbered(list(zip(groups, members, strict=True)), device)
    scores = returns_R.detach().double() - penalties_R.detach().double()
    return _relative(scores, ids, _weights(trajectories, statistics), True, eps, singleton).to(returns_R.dtype)


def gigpo_advantages(
    rewards_R: Tensor,
    penalties_R: Tensor,
    groups: Sequence[str],
    members: Sequence[int],
    turns: Sequence[int],
    anchors: Sequence[Hashable],
    turn_weight: float = 1.0,
    gamma: float = 0.95,
    norm: TurnNorm = "mean_norm",
    statistics: Statistics = "rows",
    eps: float = STD_EPS,
    singleton: Singleton = "zero",
) -> Tensor:
    """Return GiGPO's advantage of each turn [R]: its episode relative to the group, plus the turn relative to others
    from the same state::

        A = A_episode + turn_weight A_turn                                   eq. 8
        A_episode   return - penalty against its group, return: sum of the trajectory's rewards          eq. 3
        A_turn      G_k - penalty against the rows of its group with the same anchor                     eq. 6, 7
        G_k = r_k + gamma G_{k+1}                                            eq. 5; no penalties of later turns

    ``mean_norm`` subtracts the mean of the set, ``mean_std_norm`` divides by its unbiased std + eps, too. A set of
    equal scores gives exactly 0, and so does a state that was met once (as released, whatever ``singleton`` is). A
    trajectory that returns to a state counts there each time.

    Args:
        rewards_R: the environment's reward of each turn.
        penalties_R: penalty of each turn, see ``turn_advantages``.
        groups: of each row.
        members: index in the group of each row's trajectory.
        turns: number of each row in its trajectory, from 0; a turn that is not among the rows counts as reward 0.
        anchors: state before the turn: the environment's text, without history.
        turn_weight: of A_turn; 0 leaves A_episode.
        gamma: discount per turn.
        norm: see above.
        statistics: of A_episode, see ``turn_advantages``; states are compared by rows.
        eps: added to the standard deviation.
        singleton: of A_episode, see ``turn_advantages``.

    Raises:
        ValueError: unknown norm, statistics or singleton; a negative turn, or two rows for a turn of a trajectory.
    """
    _check(statistics, singleton)
    if norm not in ("mean_norm", "mean_std_norm"):
        raise ValueError(f"unknown norm '{norm}'; expected mean_norm or mean_std_norm")
    divide, device = norm == "mean_std_norm", rewards_R.device
    ids, trajectories = _numbered(groups, device), _numbered(list(zip(groups, members, strict=True)), device)
    rewards, penalties = rewards_R.detach().double(), penalties_R.detach().double()
    episodes = rewards.new_zeros(len(rewards)).index_add(0, trajectories, rewards)[trajectories]
    episode = _relative(episodes - penalties, ids, _weights(trajectories, statistics), divide, eps, singleton)
    states = _numbered(list(zip(groups, anchors, strict=True)), device)
    led_to = discounted_returns(rewards, trajectories, turns, gamma) - penalties
    turn = _relative(led_to, states, torch.ones_like(led_to), divide, eps, "zero")
    return (episode + turn_weight * turn).to(rewards_R.dtype)


def similar_states(
    texts: Sequence[str], groups: Sequence[str], members: Sequence[int], turns: Sequence[int], ratio: float
) -> list[int]:
    """Return a number for each row, the same for rows of a group with similar states (texts).

    Source: verl-agent's search script (gigpo/core_gigpo.py, build_step_group). Rows are taken by member, then turn.
    Each joins the first set whose first text it resembles by at least ``ratio``, or begins a set. difflib's ratio is
    not symmetric: the row's text is compared with the set's.

    >>> similar_states(["a red fox", "a red box", "a hen"], ["g"] * 3, [0, 1, 2], [0, 0, 0], 0.8)
    [0, 0, 1]
    """
    numbers = [0] * len(texts)
    firsts: dict[str, list[tuple[str, int]]] = {}  # by group: first text and number of its sets
    count = 0
    for i in sorted(range(len(texts)), key=lambda i: (members[i], turns[i])):
        sets = firsts.setdefault(groups[i], [])
        found = (number for first, number in sets if SequenceMatcher(None, texts[i], first).ratio() >= ratio)
        number = next(found, None)
        if number is None:
            number, count = count, count + 1
            sets.append((texts[i], number))
        numbers[i] = number
    return numbers


def discounted_returns(rewards_R: Tensor, trajectories_R: Tensor, turns: Sequence[int], gamma: float) -> Tensor:
    """Return the discounted return from each turn on [R]: G_k = sum_{j >= k} gamma^(j - k) r_j in float64, by
    trajectory.

    Args:
        rewards_R: of each turn.
        trajectories_R: number of each row's trajectory, from 0; int64.
        turns: of each row in its trajectory, from 0. A turn that is not among the rows counts as reward 0.
        gamma: discount per turn.

    Raises:
        ValueError: a negative turn, or two rows for a turn of a trajectory.
    """
    if len(rewards_R) == 0:
        return rewards_R.double()
    turn = torch.as_tensor(turns, dtype=torch.int64, device=rewards_R.device)
    if int(turn.min()) < 0:
        raise ValueError(f"turn {int(turn.min())}; expected turns counted from 0")
    length, count = int(turn.max()) + 1, int(trajectories_R.max()) + 1
    cell = trajectories_R * length + turn
    if int(torch.bincount(cell).max()) > 1:
        raise ValueError("two rows are the same turn of the same trajectory; expected one row per turn")
    table = torch.zeros(count * length, dtype=torch.float64, device=turn.device)
    table = table.index_add(0, cell, rewards_R.double()).view(count, length)
    later = torch.arange(length, device=turn.device)
    later = later[:, None] - later[None]  # [j, k]: j - k
    discounts = torch.where(later >= 0, gamma ** later.clamp(min=0).double(), 0.0)
    return (table @ discounts).flatten()[cell]


def information_gain_advantages(
    gains: Sequence[Sequence[float | None]],
    outcomes: Sequence[float],
    groups: Sequence[str],
    gamma: float = 1.0,
    pool: Pool = "separate",
) -> list[list[float]]:
    """Return IGPO's advantage of each turn, by trajectory (arXiv 2510.14967; its code of February 2026)::

        r_k = gain of turn k < T,  r_T = outcome        z = (r - mean) / (std + 1e-6)        A_k = z_k + gamma A_{k+1}

    The deviation is ``sqrt(population variance + 1e-8)``, 1 for a single value. First normalised, then discounted.

    >>> information_gain_advantages([[0.2], [0.4]], [1.0, 1.0], ["g", "g"])
    [[-0.9999400..., 0.0], [0.9999400..., 0.0]]

    Args:
        gains: of each trajectory, one per turn but the last; None where it is not known: z = 0, and no mean has it.
        outcomes: of each trajectory.
        groups: of each trajectory.
        gamma: discount per turn.
        pool: what mean and deviation are over: ``separate`` (outcomes of the group; gains of all turns of the group) or
            ``joint`` (all of them).

    Raises:
        ValueError: unknown pool.
    """
    if pool not in ("separate", "joint"):
        raise ValueError(f"unknown pool '{pool}'; expected separate or joint")
    found: list[list[float]] = [[] for _ in groups]
    for rows in _members(groups):
        ends, turns = [outcomes[row] for row in rows], [gain for row in rows for gain in gains[row] if gain is not None]
        of_ends, of_turns = (ends, turns) if pool == "separate" else ([*ends, *turns],) * 2
        for row in rows:
            following = _standardised(outcomes[row], of_ends)
            found[row] = [following]
            for gain in reversed(gains[row]):
                z = 0.0 if gain is None else _standardised(gain, of_turns)
                following = z + gamma * following
                found[row].insert(0, following)
    return found


def _standardised(value: float, of: Sequence[float]) -> float:
    if len(of) == 1:
        return (value - of[0]) / (1.0 + STD_EPS)
    mean = math.fsum(of) / len(of)
    variance = math.fsum((one - mean) ** 2 for one in of) / len(of)
    return (value - mean) / (math.sqrt(variance + 1e-8) + STD_EPS)


def _members(groups: Sequence[str]) -> list[list[int]]:
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return [*rows.values()]


def tree_values(
    paths: Sequence[Sequence[Hashable]],
    rewards: Sequence[float],
    groups: Sequence[str],
    surprisals: Mapping[Hashable, float],
    weighting: TreeWeighting = "surprisal",
) -> dict[Hashable, float]:
    """Return AT2PO's value of each turn of a tree of trajectories (arXiv 2601.04767; its released code), which is also
    its advantage::

        V(leaf) = (reward - mean) / (std + 1e-6)  over the trajectories of the group, population std
        V(turn) = sum over the turns c that follow it of w_c V(c)        w = softmax of their mean -log p, or equal

    Turns that several trajectories share have one value. The mean is over the turns that follow, not over the
    trajectories below. Equal rewards give 0.

    Args:
        paths: the turns of each trajectory, from the first to the last; equal names are one turn.
        rewards: of each trajectory.
        groups: of each trajectory.
        surprisals: mean -log p of the sampled tokens of each turn, nats.
        weighting: surprisal (the softmax, as released) or equal.

    A trajectory that ends where another one goes on counts as one that follows.

    Raises:
        ValueError: unknown weighting.
    """
    if weighting not in ("surprisal", "equal"):
        raise ValueError(f"unknown weighting '{weighting}'; expected surprisal or equal")
    following: dict[Hashable, dict[Hashable, None]] = {}
    for path in paths:
        for turn, after in pairwise(path):
            following.setdefault(turn, {})[after] = None
    values: dict[Hashable, float] = {}
    for rows in _members(groups):
        of = [rewards[row] for row in rows]
        mean = math.fsum(of) / len(of)
        std = math.sqrt(math.fsum((one - mean) ** 2 for one in of) / len(of))
        for row in rows:
            if not paths[row]:
                continue
            end: Hashable = paths[row][-1]
            if end in following:
                following[end]["end", row] = None
                end = ("end", row)
            values[end] = (rewards[row] - mean) / (std + STD_EPS) if max(of) > min(of) else 0.0
    for path in paths:
        for turn in reversed(path):
            _evaluate(turn, values, following, surprisals, weighting)
    return values


def _evaluate(
    turn: Hashable,
    values: dict[Hashable, float],
    following: Mapping[Hashable, Mapping[Hashable, None]],
    surprisals: Mapping[Hashable, float],
    weighting: TreeWeighting,
) -> float:
    """Return the value of a turn, and store it in ``values`` with those of all turns that follow."""
    if turn not in values:
        after = list(following[turn])
        known = [_evaluate(one, values, following, surprisals, weighting) for one in after]
        unsure = [surprisals.get(one, surprisals[turn]) for one in after]
        powers = [math.exp(h - max(unsure)) if weighting == "surprisal" else 1.0 for h in unsure]
        values[turn] = math.fsum(w * v for w, v in zip(powers, known, strict=True)) / math.fsum(powers)
    return values[turn]


# ---------------------------------------------------------------------- sets of rows
def _relative(scores: Tensor, sets: Tensor, weights: Tensor, divide: bool, eps: float, singleton: Singleton) -> Tensor:
    """Subtract from each score [R] (float64) the weighted mean of its set of rows, and divide by the set's std if
    ``divide``. Weights sum to the set's size n; the unbiased variance has n - 1."""

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(values)).index_add(0, sets, values)[sets]

    n = total(weights).round()
    centred = scores - total(weights * scores) / n
    std = (total(weights * centred.square()) / (n - 1).clamp(min=1.0)).sqrt()
    highest, lowest = (
        scores.new_zeros(len(scores)).scatter_reduce(0, sets, scores, how, include_self=False)[sets]
        for how in ("amax", "amin")
    )
    relative = centred / (std + eps) if divide else centred
    relative = torch.where(highest > lowest, relative, torch.zeros_like(relative))
    return torch.where(n > 1, relative, scores if singleton == "reward" else torch.zeros_like(scores))


def _weights(trajectories: Tensor, statistics: Statistics) -> Tensor:
    """Return the weight of each row in its group's mean [R]: 1, or 1 / rows of its trajectory."""
    if statistics == "rows":
        return torch.ones(len(trajectories), dtype=torch.float64, device=trajectories.device)
    return 1.0 / torch.bincount(trajectories).double()[trajectories]


def _numbered(names: Sequence[Hashable], device: torch.device) -> Tensor:
    """Return a number for each name [R] int64. Equal names get equal numbers, from 0 in order of first appearance."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64, device=device)


def _check(statistics: str, singleton: str) -> None:
    if statistics not in ("rows", "trajectories"):
        raise ValueError(f"unknown statistics '{statistics}'; expected rows or trajectories")
    if singleton not in ("zero", "reward"):
        raise ValueError(f"singleton is '{singleton}'; expected zero or reward")
