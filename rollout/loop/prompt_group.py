"""The trajectories of one prompt: each waits for a slot, runs, is scored and delivered.

`Slots` limits the trajectories in flight, `Admission` lets weight updates wait for whole groups.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from common.seeds import derive_seed
from rollout.loop.agent_loop import Request
from rollout.protocols.base import ChatProtocol
from rollout.rewards.base import Scorer
from rollout.samplers.base import NO_HOOKS, Hooks, RunningView
from rollout.trajectory import InfrastructureError, StopReason, Task, Trajectory, TrajectoryPrefix

logger = logging.getLogger(__name__)

Priority = int | tuple[int, int]  # of one kind within one semaphore


class TrajectoryLoop(Protocol):
    """Plays one task to its end: `AgentLoop`, or a program's loop."""

    failures: deque[str]  # the latest reasons of left-out trajectories

    @property
    def protocol(self) -> ChatProtocol: ...

    async def run(
        self,
        task: Task,
        *,
        group: str,
        index: int,
        request: Request,
        start: TrajectoryPrefix | None = None,
        at: int = 0,
        key: int | str | None = None,
    ) -> Trajectory: ...


class Admission:
    """Lets a weight update wait until all running groups are done. No group begins meanwhile.

    The unit is the group and not the trajectory, because its members are compared with each other, a branch continues
    its parent, and a sampler may wait in one trajectory for another of the group. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._running = 0
        self._updates: set[object] = set()
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()

    def group(self) -> GroupAdmission:
        return GroupAdmission(self)

    async def idle(self) -> None:
        """Wait until no group is running."""
        await self._idle.wait()

    def close(self, update: object) -> None:
        """Let no group begin until ``reopen`` is called with the same ``update`` (any object)."""
        self._updates.add(update)
        self._open.clear()

    def reopen(self, update: object) -> None:
        """Let groups begin again after ``close``, once no other update is waiting. A second call has no effect."""
        self._updates.discard(update)
        if not self._updates:
            self._open.set()

    async def opened(self) -> None:
        """Wait until no weight update keeps groups from beginning."""
        await self._open.wait()

    def enter(self) -> bool:
        """Count a group as running and return True; return False while a weight update is waiting."""
        if self._updates:
            return False
        self._running += 1
        self._idle.clear()
        return True

    def leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()


class GroupAdmission:
    """Context manager around a group's whole run, for which weight updates wait."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._begun = admission, False

    async def opened(self) -> None:
        """Wait until the group may begin. Returns at once if it has begun."""
        if not self._begun:
            await self._admission.opened()

    def begin(self) -> bool:
        """Let the group begin, unless a weight update is waiting. Returns whether the group has begun."""
        self._begun = self._begun or self._admission.enter()
        return self._begun

    def __enter__(self) -> GroupAdmission:
        return self

    def __exit__(self, *error: object) -> None:
        if self._begun:
            self._admission.leave()


class Slots:
    """A semaphore with priorities that allows ``count`` trajectories in flight. Belongs to one event loop.

    The lowest number goes first, then the earliest arrival, so that a prompt's forks run before later prompts."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._order = itertools.count()
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []

    def take(self, priority: Priority) -> Slot:
        return Slot(self, priority)

    async def acquire(self, priority: Priority) -> None:
        if self._free:
            self._free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # the slot was handed over at the same moment
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            waiter = heapq.heappop(self._waiting)[2]
            if not waiter.done():  # not cancelled
                waiter.set_result(None)
                return
        self._free += 1


class Slot:
    """One permit of the ``Slots`` semaphore, as an asynchronous context manager."""

    def __init__(self, slots: Slots, priority: Priority) -> None:
        self._slots, self._priority = slots, priority
        self._held = False

    async def __aenter__(self) -> Slot:
        await self._slots.acquire(self._priority)
        self._held = True
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._held:
            self._slots.release()

    async def released_during(self, work: Awaitable[None]) -> None:
        """Release the semaphore's permit while ``work`` runs, then wait for one again. If ``work`` raises, it stays
        released."""
        self._slots.release()
        self._held = False
        await work
        await self.__aenter__()


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Runs, scores and delivers the trajectories of one prompt. Implements ``samplers.base.GroupRunner``."""

    agent_loop: TrajectoryLoop
    slots: Slots
    scorer: Scorer | None  # None: the environment scores itself
    task: Task
    group: str
    priority: tuple[int, int]  # batch, position in the batch; lower ones come first
    request: Request
    deliver: Callable[[Trajectory], None]  # receives each trajectory that counts, once it is scored
    admission: GroupAdmission  # lets the group begin unless a weight update is waiting

    @property
    def seed(self) -> int:
        return derive_seed(self.request.seed, self.group)

    @property
    def vocabulary(self) -> int:
        return len(self.agent_loop.protocol.tokenizer)

    async def run(
        self,
        index: int,
        *,
        start: TrajectoryPrefix | None = None,
        at: int = 0,
        key: int | str | None = None,
        hooks: Hooks = NO_HOOKS,
        counts: bool = True,
    ) -> Trajectory:
        async with self._admitted() as slot:
            request = dataclasses.replace(self.request, hooks=_releasing(hooks, slot))
            trajectory = await self.agent_loop.run(
                self.task, group=self.group, index=index, request=request, start=start, at=at, key=key
            )
        if not counts:
            return trajectory
        trajectory = await self._scored(trajectory)
        self.deliver(trajectory)
        return trajectory

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[Slot]:
        """Context manager that waits until the group may begin and has a slot (permit to run). While a weight update
        keeps the group from beginning, the slot is free for running groups."""
        while True:
            await self.admission.opened()
            async with self.slots.take(self.priority) as slot:
                if self.admission.begin():
                    yield slot
                    return

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with its reward. If the reward's service failed, return the trajectory marked as an
        infrastructure failure."""
        if trajectory.left_out or self.scorer is None:
            return trajectory
        try:
            return trajectory.replace(reward=await self.scorer.score(trajectory))
        except InfrastructureError as error:
            name = f"{self.group}/{trajectory.index}"
            logger.warning("the reward of trajectory %s failed by infrastructure: %s", name, error)
            self.agent_loop.failures.append(str(error))
            return trajectory.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)


def group_names(tasks: Sequence[Task]) -> list[str]:
    """Return a distinct group id per task: the task's id, followed by "#2", "#3", ... at later occurrences."""
    seen: Counter[str] = Counter()
    groups = []
    for task in tasks:
        seen[task.id] += 1
        groups.append(task.id if seen[task.id] == 1 else f"{task.id}#{seen[task.id]}")
    return groups


def _releasing(hooks: Hooks, slot: Slot) -> Hooks:
    """Return a sampler's hooks, with an ``on_result`` that releases the trajectory's slot while it runs."""
    on_result = hooks.on_result
    if on_result is None:
        return hooks

    async def without_slot(state: RunningView) -> None:
        await slot.released_during(on_result(state))

    return dataclasses.replace(hooks, on_result=without_slot)
