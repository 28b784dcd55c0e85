"""Protocols of a reward, synchronous or asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import Any, Protocol, cast, runtime_checkable

from rollout.trajectory import Reward, Trajectory, finite_number, scored_by

THREADS = min(32, (os.cpu_count() or 1) + 4)  # that score at once: those of a loop's executor


class RewardFunction(Protocol):
    def score(self, trajectory: Trajectory) -> Reward:
        """Score a finished trajectory from its parsed answer, calls and task. Prints nothing, draws nothing.

        A bare number is accepted as the total (``Scorer``). Raises InfrastructureError where a service fails: the
        trajectory is then left out, and never given a score for it."""
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


class Scorer:
    """Scores trajectories by either kind of reward. Belongs to one event loop.

    A synchronous reward is called in threads: one that computes for long must not hold up the other trajectories. A
    thread scores all that waits by then, since handing each trajectory to a thread costs more than most rewards.
    """

    def __init__(self, reward: RewardFunction | AsyncReward) -> None:
        self._asynchronous = reward if isinstance(reward, AsyncReward) else None
        self._reward = reward
        self._waiting: deque[tuple[Trajectory, asyncio.Future[Any]]] = deque()
        self._threads = 0
        self._lock = threading.Lock()  # guards the two against each other: what waits has a thread

    async def score(self, trajectory: Trajectory) -> Reward:
        """The trajectory's reward; a bare number is its total.

        Raises:
            RewardError: the reward returned something else, or a total or part that is not a finite number.
            Exception: what the reward raises.
        """
        with scored_by(self._reward, trajectory):
            found = await self._answer(trajectory)
            if isinstance(found, Reward):
                return Reward(found.total, found.parts)  # checked again: another process may have sent it
            return Reward(finite_number(found, "the returned value"))

    async def _answer(self, trajectory: Trajectory) -> Any:
        if self._asynchronous is not None:
            return await self._asynchronous.score_async(trajectory)
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            self._waiting.append((trajectory, future))
            starts = self._threads < THREADS
            self._threads += starts
        if starts:
            loop.run_in_executor(None, self._work, loop)
        return await future

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: score until nothing waits."""
        reward = cast(RewardFunction, self._reward)
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                trajectory, future = self._waiting.popleft()
            if future.cancelled():
                continue
            outcome: Any
            try:
                outcome = reward.score(trajectory)
            except BaseException as error:  # for whoever waits for it
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(_resolve, future, outcome)


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
