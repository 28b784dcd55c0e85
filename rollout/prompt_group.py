"""One prompt's runs: each under way in its turn, scored, and handed over."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollout.agent_loop import AgentLoop, Request
from rollout.places import Place, Places
from rollout.rewards.base import AsyncReward, RewardFunction, score
from rollout.running_trajectory import RunningTrajectory
from rollout.sampling import Watch, derive_seed
from rollout.trajectory import InfrastructureError, StopReason, Task, Trajectory
from rollout.update_gate import GroupPass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """What a sampler sees of one prompt (``sampling.GroupRunner``)."""

    agent_loop: AgentLoop
    places: Places
    reward: RewardFunction | AsyncReward | None
    task: Task
    group: str
    position: tuple[int, int]  # of its batch, and of the prompt in it: lower ones come first
    request: Request
    deliver: Callable[[Trajectory], None]  # takes each trajectory that counts, as soon as it is scored
    gate: GroupPass  # lets the group begin, unless new weights are being waited for

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
        start: Trajectory | RunningTrajectory | None = None,
        at: int = 0,
        key: int | str | None = None,
        watch: Watch = Watch(),
        counts: bool = True,
    ) -> Trajectory:
        async with self._admitted() as place:
            request = dataclasses.replace(self.request, watch=_leaving_its_place(watch, place))
            trajectory = await self.agent_loop.run(
                self.task, group=self.group, index=index, request=request, start=start, at=at, key=key
            )
        if not counts:
            return trajectory
        trajectory = await self._scored(trajectory)
        self.deliver(trajectory)
        return trajectory

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[Place]:
        """A place, which is given back while the group may not begin: others, which have begun, need it to end."""
        while True:
            await self.gate.opened()
            async with self.places.take(self.position) as place:
                if self.gate.begin():
                    yield place
                    return

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """A reward whose service failed says nothing about the policy: the trajectory is left out, as if a tool had
        failed."""
        if trajectory.failed_by_infrastructure or self.reward is None:
            return trajectory
        try:
            return trajectory.replace(reward=await score(self.reward, trajectory))
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


def _leaving_its_place(watch: Watch, place: Place) -> Watch:
    on_result = watch.on_result
    if on_result is None:
        return watch

    async def away(state: RunningTrajectory) -> None:
        await place.away(on_result(state))

    return dataclasses.replace(watch, on_result=away)
