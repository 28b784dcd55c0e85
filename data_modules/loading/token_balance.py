"""Balances tokens over ranks: whole prompt groups are exchanged after the rollout.

A group stays together (its advantages need no communication), every rank keeps as many groups as it rolled out,
and each trajectory keeps its position in the rollout batch of all ranks, by which it is dealt to optimiser steps:
what is learnt does not depend on who holds it.
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
    """Trajectories of a rank after the exchange.

    Attributes:
        trajectories: each with its ``batch_index``, its position in the batch of all ranks.
        imbalance: tokens of the rank with the most over the mean, before and after; None where nothing was exchanged.
    """

    trajectories: list[Trajectory]
    imbalance: tuple[float, float] | None = None


def tokens_of(group: Sequence[Trajectory]) -> int:
    """What a group costs to learn from: tokens of prompt and response of what models read, failures left out."""
    rows = (row for t in group if not t.failed_by_infrastructure for row in split_turns(t))
    return sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)


def assign(costs: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For each rank, the groups (rank, position) that it is to have: as many as it has now, sums as even as can be
    found quickly, and the same wherever it is computed.

    The costliest group first, each to the rank with the least so far that has room; then two ranks swap a group, as
    long as that makes the larger of their sums smaller, beginning with the rank that has the most.

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
    """(rank with the most, its group, other rank, its group) whose exchange lowers the larger of the two sums most."""
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
    """The largest over the mean; 1.0 where all are equal."""
    return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0


def balance(groups: Sequence[Sequence[Trajectory]], first_index: int, rank: int, exchange: bool = True) -> Share:
    """Number this rank's trajectories, and exchange groups over the ranks' process group. Every rank must call.

    Args:
        groups: this rank's, each whole.
        first_index: of its first trajectory in the batch of all ranks.
        exchange: else every group stays, and there is no collective.
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
