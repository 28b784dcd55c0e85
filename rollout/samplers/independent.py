"""Independent trajectories of a prompt, as in GRPO and PPO."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollout.samplers.base import GroupRunner
from rollout.trajectory import Trajectory


class IndependentSampler:
    """``n`` trajectories from the prompt, each on its own (GRPO, PPO)."""

    forks = False

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        return await run_independent(group, range(n))


async def run_independent(group: GroupRunner, indices: Iterable[int]) -> list[Trajectory]:
    """These members of a group, from the prompt."""
    async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
        running = [tasks.create_task(group.run(index)) for index in indices]
    return [task.result() for task in running]
