"""Protocols of a reward, synchronous or asynchronous."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from rollout.trajectory import Reward, Trajectory


class RewardFunction(Protocol):
    def score(self, trajectory: Trajectory) -> Reward:
        """Score a finished trajectory from its parsed answer, calls and task. Prints nothing, draws nothing.

        InfrastructureError where a service fails: the trajectory is then left out, and never given a score for it."""
        ...


@runtime_checkable
class AsyncReward(Protocol):
    """A reward whose work is asynchronous, such as running a solution's tests in a sandbox. It is awaited in the event
    loop, where other trajectories wait for whatever it computes itself. Where it has a ``start`` too
    (``tools.base.Startable``), that comes before a model loads."""

    async def score_async(self, trajectory: Trajectory) -> Reward:
        """As ``RewardFunction.score``."""
        ...

    async def close(self) -> None:
        """Idempotent; a later use starts again."""
        ...


async def score(reward: RewardFunction | AsyncReward, trajectory: Trajectory) -> Reward:
    """The trajectory's reward, by either kind. Raises what the reward raises."""
    if isinstance(reward, AsyncReward):
        return await reward.score_async(trajectory)
    # In a thread: a reward that computes for long must not hold up the other trajectories.
    return await asyncio.to_thread(reward.score, trajectory)
