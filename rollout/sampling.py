"""Which trajectories exist: the seam between a prompt and its group."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from rollout.trajectory import Task, Trajectory

if TYPE_CHECKING:
    from rollout.engines.base import Generation
    from rollout.running_trajectory import RunningTrajectory


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**62) from the parts, the same in every process and on every machine (``hash()`` is not).

    >>> derive_seed(0, "q1", 3, 0) == derive_seed(0, "q1", 3, 0) != derive_seed(0, "q1", 30, 0)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2


class GroupRunner(Protocol):
    """What a sampler is given for one prompt."""

    task: Task
    seed: int  # for the sampler's own decisions; the runs derive theirs by themselves

    async def run(
        self,
        index: int,
        *,
        start: Trajectory | RunningTrajectory | None = None,
        at: int = 0,
        on_turn: Callable[[RunningTrajectory, Generation], Awaitable[None]] | None = None,
    ) -> Trajectory:
        """Roll out member ``index``, scored. With ``start`` it branches off at response offset ``at``; ``on_turn``
        is awaited after each sampled turn, before its calls run (see AgentLoop.run)."""
        ...


class Sampler(Protocol):
    """Decides which trajectories of a prompt are rolled out."""

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        """Exactly ``n`` trajectories of one prompt, by index 0 .. n-1."""
        ...


class IndependentSampler:
    """``n`` trajectories from the prompt, each on its own (GRPO, PPO)."""

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
            running = [tasks.create_task(group.run(index)) for index in range(n)]
        return [task.result() for task in running]
