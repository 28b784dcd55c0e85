"""Sampler that continues given beginnings of trajectories with the current policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout.samplers.base import GroupRunner

if TYPE_CHECKING:  # a configuration cannot contain a trajectory
    from rollout.trajectory import Trajectory


class ContinuationSampler:
    """Samples ``n`` continuations of one given beginning of a trajectory per group.

    Args:
        prefixes: task id -> a finished trajectory and the response offset to continue from, at the start of a turn.
    """

    forks = True

    def __init__(self, prefixes: Mapping[str, tuple[Trajectory, int]]) -> None:
        self._prefixes = prefixes

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        start, at = self._prefixes[group.task.id]
        return [await group.run(index, start=start, at=at) for index in range(n)]
