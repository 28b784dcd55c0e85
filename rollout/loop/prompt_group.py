"""The trajectories of one prompt: each waits for a slot, runs, is scored and delivered."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.seeds import derive_seed
from rollout.loop.admission import GroupAdmission, Slot, Slots
from rollout.loop.agent_loop import AgentLoop, Request
from rollout.rewards.base import Scorer
from rollout.samplers.base import NO_HOOKS, Hooks, RunningView
from rollout.trajectory import InfrastructureError, StopReason, Task, Trajectory, TrajectoryPrefix

logger = logging.getLogger(__name__)


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
