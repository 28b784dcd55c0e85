"""A workshop where a product must pass through its devices in the right order, which the agent is not told.

``task.metadata["recipe"]`` lists the devices. The first observation is the question, which ends with "step 1". Every
later observation ends with the next step, so the agent can read its progress but not the recipe. An action is a step
and a device, "step 1 kiln"; only the right device has an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from common.ranges import PositiveFloat
from rollout.environments.base import ACT, FirstObservation, StepResult, act_in_order, check_tasks, refusal
from rollout.trajectory import Action, CallOutcome, Task, ToolCall, ToolRequest, ToolResult, Turn


class Recipes:
    """Environment factory for recipes, where the agent must find the devices of a product: makes one environment per
    trajectory.

    Args:
        reward: reward for a finished product, which ends the episode; otherwise 0.
    """

    scores_itself: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = (ACT,)

    def __init__(self, reward: PositiveFloat = 1.0) -> None:
        self.reward = reward

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> RecipeEpisode:
        return RecipeEpisode(task, self.reward, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Raise ValueError if any task has no recipe (list of devices)."""
        check_tasks(tasks, recipe_of, "tasks without a recipe")

    async def close(self) -> None:
        """Do nothing: episodes share nothing."""


def recipe_of(task: Task) -> list[str]:
    """Return the devices of a task's recipe, in order. Raises ValueError if the task has none."""
    recipe = task.metadata.get("recipe")
    if not isinstance(recipe, list) or not recipe or not all(isinstance(device, str) for device in recipe):
        raise ValueError(f"task {task.id}: metadata['recipe'] is {recipe!r:.100}; expected a list of devices")
    return recipe


class RecipeEpisode:
    """Environment of one episode, where the agent makes one product. Its measures are ``success`` (0 or 1) and
    ``steps`` (devices used).
    """

    def __init__(self, task: Task, reward: float, tools_enabled: bool) -> None:
        self._task, self._reward, self._enabled = task, reward, tools_enabled
        self._recipe = recipe_of(task)
        self._right = self._used = 0

    @property
    def _done(self) -> bool:
        return self._right == len(self._recipe)

    async def reset(self) -> FirstObservation:
        return FirstObservation(self._task.question, measures=self._measures())

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float | None:
        """Continue an episode after ``calls`` by repeating their actions, and return the reward so far."""
        for call in calls:
            if call.executed:
                await self._act(call.request)
        return self._reward * self._done

    async def step(self, action: Action) -> StepResult:
        before = self._done
        results, latencies = await act_in_order(action, self._act)
        reward = self._reward * (self._done and not before)
        return StepResult(results, latencies, done=self._done, reward=reward, measures=self._measures())

    def _measures(self) -> dict[str, float]:
        return {"success": float(self._done), "steps": float(self._used)}

    async def _act(self, request: ToolRequest) -> ToolResult:
        if why := refusal(request, self._enabled, "The product is finished." if self._done else None):
            return ToolResult(why, CallOutcome.REFUSED, detail=why)
        self._used += 1
        if request.arguments.get("action") != f"step {self._right + 1} {self._recipe[self._right]}":
            return ToolResult(f"nothing happens. step {self._right + 1}", CallOutcome.ERROR)
        self._right += 1
        return ToolResult("done" if self._done else f"step {self._right + 1}", CallOutcome.OK)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
