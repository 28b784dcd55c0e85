"""The trajectories of one prompt: each waits for a slot, runs, is scored and delivered."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.seeds import derive_seed
from rollout.loop.agent_loop import AgentLoop, Request
from rollout.rewards.base import Scorer
from rollout.samplers.base import NO_HOOKS, Hooks, RunningView
from rollout.trajectory import InfrastructureError, StopReason, Task, Trajectory, TrajectoryPrefix

logger = logging.getLogger(__name__)

Priority = int | tuple[int, int]  # of one kind within one semaphore


class Admission:
    """Any number of groups may run; an update waits until all that have begun are done, and none begins meanwhile.

    The unit is the prompt's group and not the trajectory: its members are compared with each other, a branch goes on
    where its parent was, and a sampler may wait in one trajectory for another of the same group. Belongs to one event
    loop.
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
        """Wait until nothing is in flight."""
        await self._idle.wait()

    def close(self, update: object) -> None:
        """An update waits: no other group begins until ``reopen`` for the same ``update``, whatever names it."""
        self._updates.add(update)
        self._open.clear()

    def reopen(self, update: object) -> None:
        """That update is done, or given up. Without effect the second time."""
        self._updates.discard(update)
        if not self._updates:
            self._open.set()

    async def opened(self) -> None:
        """Wait until no update waits."""
        await self._open.wait()

    def enter(self) -> bool:
        """Let a group begin; False while an update waits."""
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
    """Admission of one group, as a context manager around all it does."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._begun = admission, False

    async def opened(self) -> None:
        """Wait until the group may begin; at once if it has begun."""
        if not self._begun:
            await self._admission.opened()

    def begin(self) -> bool:
        """Begin, unless an update waits. True if the group has begun, now or before."""
        self._begun = self._begun or self._admission.enter()
        return self._begun

    def __enter__(self) -> GroupAdmission:
        return self

    def __exit__(self, *error: object) -> None:
        if self._begun:
            self._admission.leave()


class Slots:
    """Semaphore of ``count`` slots. Waiters are admitted by priority, the lowest number first, then by arrival: the
    forks of a prompt before later prompts. Belongs to one event loop."""

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
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was handed over in the same moment
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._free += 1


class Slot:
    """One slot, as an asynchronous context manager."""

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
        """Release the slot until ``work`` is done, then wait for one. If ``work`` raises, it stays released."""
        self._slots.release()
        self._held = False
        await work
        await self.__aenter__()


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """What a sampler sees of one prompt (``samplers.base.GroupRunner``)."""

    agent_loop: AgentLoop
    slots: Slots
    scorer: Scorer | None  # None: the environment scores itself
    task: Task
    group: str
    priority: tuple[int, int]  # its batch, and its position in it: lower ones come first
    request: Request
    deliver: Callable[[Trajectory], None]  # takes each trajectory that counts, as soon as it is scored
    admission: GroupAdmission  # lets the group begin, unless new weights are being waited for

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
        """A slot, which is released while the group may not begin: others, which have begun, need it to end."""
        while True:
            await self.admission.opened()
            async with self.slots.take(self.priority) as slot:
                if self.admission.begin():
                    yield slot
                    return

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """A reward whose service failed says nothing about the policy: the trajectory is left out, as if a tool had
        failed."""
        if trajectory.failed_by_infrastructure or self.scorer is None:
            return trajectory
        try:
            return trajectory.replace(reward=await self.scorer.score(trajectory))
        except InfrastructureError as error:
            name = f"{self.group}/{trajectory.index}"
            logger.warning("the reward of trajectory %s failed by infrastructure: %s", name, error)
            self.agent_loop.failures.append(str(error))
            return trajectory.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)


def group_names(tasks: Sequence[Task]) -> list[str]:
    """A distinct group id per position: the task's id, from its second occurrence on with "#2", "#3", ..."""
    seen: Counter[str] = Counter()
    groups = []
    for task in tasks:
        seen[task.id] += 1
        groups.append(task.id if seen[task.id] == 1 else f"{task.id}#{seen[task.id]}")
    return groups


def _releasing(hooks: Hooks, slot: Slot) -> Hooks:
    """The hooks, ``on_result`` without the slot."""
    on_result = hooks.on_result
    if on_result is None:
        return hooks

    async def without_slot(state: RunningView) -> None:
        await slot.released_during(on_result(state))

    return dataclasses.replace(hooks, on_result=without_slot)
