"""Protocols of a reward, synchronous or asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import Any, Protocol, cast, runtime_checkable

from common.async_calls import holdable
from rollout.trajectory import Reward, Trajectory, finite_number, scored_by

THREADS = min(32, (os.cpu_count() or 1) + 4)  # that score at once, as in a loop's executor


class RewardFunction(Protocol):
    def score(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a finished trajectory. Reads its parsed answer, calls and task, and neither prints nor
        draws random numbers.

        A bare number is accepted as the total (``Scorer``). Raises InfrastructureError if a service fails. The
        trajectory is then left out; it gets no score.
        """
        ...


@runtime_checkable
class AsyncReward(Protocol):
    """A reward that is computed asynchronously, such as by running a solution's tests in a sandbox. It runs in the
    event loop, so its own computations block other trajectories. If it has a ``start`` (``tools.base.Startable``), that
    runs before a model loads."""

    async def score_async(self, trajectory: Trajectory) -> Reward:
        """Return the reward of a finished trajectory, as ``RewardFunction.score`` does."""
        ...

    async def close(self) -> None:
        """Release the reward's resources. Idempotent; a later use starts again."""
        ...


class Scorer:
    """Scores trajectories with a synchronous or an asynchronous reward, in one event loop.

    Threads call a synchronous reward, so a long computation does not block other trajectories. A thread scores all
    trajectories that wait by then, because handing over each one costs more than most rewards.
    """

    def __init__(self, reward: RewardFunction | AsyncReward) -> None:
        self._asynchronous = reward if isinstance(reward, AsyncReward) else None
        self._reward = reward
        self._waiting: deque[tuple[Trajectory, asyncio.Future[Any]]] = deque()
        self._threads = 0
        self._lock = threading.Lock()  # every waiting trajectory has a thread

    async def score(self, trajectory: Trajectory) -> Reward:
        """Score a trajectory and return its reward. A bare number becomes the reward's total.

        Raises:
            RewardError: the reward returned something else, or a total or part that is not a finite number.
            Exception: any exception of the reward.
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
        """Score waiting trajectories, in a thread, until none is left."""
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
            except BaseException as error:  # raised where the score is awaited
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_resolve, future, outcome)


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, BaseException):
        future.set_exception(holdable(outcome))
    else:
        future.set_result(outcome)
