"""Exchanges whole prompt groups between ranks after the rollout, so that ranks have equally many tokens.

A group stays whole (its advantages need no communication), every rank keeps its number of groups, and each trajectory
keeps its position in the rollout batch of all ranks. The position decides its optimiser step, so the exchange does not
change what is learnt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from common.ranks import gather_objects
from rollout.trajectory import Trajectory, split_turns

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """The trajectories of one rank after the ranks have exchanged prompt groups to balance their tokens.

    Attributes:
        trajectories: each with its ``batch_index``, its position in the batch of all ranks.
        imbalance: tokens of the largest rank over the mean, before and after, or None without an exchange.
    """

    trajectories: list[Trajectory]
    imbalance: tuple[float, float] | None = None


def tokens_of(group: Sequence[Trajectory]) -> int:
    """Return the number of prompt and response tokens that the models read for a prompt group. Infrastructure failures
    do not count.
    """
    rows = (row for t in group if not t.left_out for row in split_turns(t))
    return sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)


def assign(costs: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Assign prompt groups to ranks so that every rank has nearly the same number of tokens, by a fast heuristic.
    Returns for each rank its groups as (present rank, position); every rank keeps its number of groups.

    Deterministic. The costliest group goes first, each to the rank with the smallest sum that is not full. Then two
    ranks swap a group while that lowers the larger of their sums, starting with the largest rank.

    Args:
        costs: of each rank's groups.
    """
    room = [len(own) for own in costs]
    every = [(cost, r, i) for r, own in enumerate(costs) for i, cost in enumerate(own)]
    every.sort(key=lambda item: (-item[0], *item[1:]))
    bins: list[list[tuple[int, int, int]]] = [[] for _ in costs]
    sums = [0] * len(costs)
    for item in every:
        # Of equals the rank that holds it: nothing is moved for nothing.
        rank = min((r for r in range(len(costs)) if len(bins[r]) < room[r]), key=lambda r: (sums[r], r != item[1], r))
        bins[rank].append(item)
        sums[rank] += item[0]
    while swap := _best_swap(bins, sums):
        top, i, other, j = swap
        gain = bins[top][i][0] - bins[other][j][0]
        bins[top][i], bins[other][j] = bins[other][j], bins[top][i]
        sums[top] -= gain
        sums[other] += gain
    before = max((sum(own) for own in costs), default=0)
    if max(sums, default=0) >= before:  # as even as it was: stay
        return [[(r, i) for i in range(len(own))] for r, own in enumerate(costs)]
    return [sorted((r, i) for _, r, i in found) for found in bins]


def _best_swap(bins: list[list[tuple[int, int, int]]], sums: list[int]) -> tuple[int, int, int, int] | None:
    """Find the swap of two groups that most lowers the larger token sum of their ranks. Returns (largest rank, its
    group, other rank, its group), or None.
    """
    top = max(range(len(sums)), key=lambda r: (sums[r], -r), default=0)
    best: tuple[int, tuple[int, int, int, int]] | None = None
    for other in range(len(sums)):
        for i, mine in enumerate(bins[top]):
            for j, theirs in enumerate(bins[other] if other != top else ()):
                gain = mine[0] - theirs[0]
                larger = max(sums[top] - gain, sums[other] + gain)
                if larger < sums[top] and (best is None or larger < best[0]):
                    best = (larger, (top, i, other, j))
    return None if best is None else best[1]


def imbalance(sums: Sequence[int]) -> float:
    """Return the largest of the ranks' token sums over their mean; 1.0 if all are equal."""
    return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0


def balance(groups: Sequence[Sequence[Trajectory]], first_index: int, rank: int, exchange: bool = True) -> Share:
    """Exchange prompt groups between ranks to balance their tokens, and return this rank's trajectories with their
    batch positions. A collective if ``exchange``.

    Args:
        groups: this rank's groups.
        first_index: position of the first trajectory in the batch of all ranks.
        exchange: whether groups may change ranks.
    """
    own, index = [], first_index
    for group in groups:
        own.append([t.replace(batch_index=index + k) for k, t in enumerate(group)])
        index += len(group)
    if not exchange:
        return Share([t for group in own for t in group])
    costs = gather_objects([tokens_of(group) for group in own])
    wanted = assign(costs)
    moved = {(rank, i): own[i] for i in range(len(own)) if (rank, i) not in wanted[rank]}
    # All ranks get all that moves, over the host's network: some megabytes of token ids an iteration.
    arrived = {key: group for part in gather_objects(moved) for key, group in part.items()}
    found = [own[key[1]] if key[0] == rank else arrived[key] for key in wanted[rank]]
    before, after = (sum(part) for part in costs), (sum(costs[r][i] for r, i in part) for part in wanted)
    ratios = imbalance([*before]), imbalance([*after])
    if rank == 0:
        logger.info("tokens per rank, largest over mean: %.3f as rolled out, %.3f balanced", *ratios)
    return Share([t for group in found for t in group], ratios)
