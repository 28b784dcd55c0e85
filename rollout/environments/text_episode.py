"""Base class of episodes that another package plays, with observations and actions as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.environments.base import FirstObservation, StepResult, act_in_order, refusal
from rollout.trajectory import Action, CallOutcome, Task, ToolRequest, ToolResult

ENDED = "The episode has ended."


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of observations, with ``{observation}``, or ``{observation[0]}`` and ``{observation[key]}`` for parts."""

    later: str
    first: str

    def write(self, seen: Any, first: bool = False) -> str:
        """Return an observation's text. Raises ValueError if the observation has no such part."""
        template = self.first if first else self.later
        try:
            return template.format(observation=seen)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the text {template!r} does not fit the observation {seen!r} ({type(error).__name__}: {error}); "
                "expected {observation}, or parts of it, as {observation[0]}"
            ) from error


@dataclass(frozen=True, slots=True)
class Played:
    """An environment's result of an action."""

    seen: Any
    reward: float
    over: bool


class TextEpisode:
    """One episode. Subclasses implement ``open``, ``play`` and ``close``.

    The reward's parts are ``episode_return`` (the sum of its rewards) and ``success`` (1 if that is at least
    ``success_return``; for a ``success_return`` of 0 or less, once the environment has ended the episode).
    """

    admissible: Sequence[str] | None = None  # all actions, for prompts that show them

    def __init__(self, texts: Texts, success_return: float, enabled: bool) -> None:
        self._texts, self._success_return, self._enabled = texts, success_return, enabled
        self._return, self._reward, self._over = 0.0, 0.0, False

    async def open(self) -> Any:
        """Start the episode and return the first observation."""
        raise NotImplementedError

    async def play(self, action: str) -> Played | str:
        """Execute an action. Returns a message for the model if the text is not an action."""
        raise NotImplementedError

    async def reset(self) -> FirstObservation:
        seen = await self.open()
        return FirstObservation(self._texts.write(seen, first=True), self._info(), self._measures())

    async def step(self, action: Action) -> StepResult:
        self._reward = 0.0
        results, seconds = await act_in_order(action, self._act)
        return StepResult(results, seconds, done=self._over, reward=self._reward, measures=self._measures())

    async def _act(self, request: ToolRequest) -> ToolResult:
        if why := refusal(request, self._enabled, ENDED if self._over else None):
            return ToolResult(why, CallOutcome.REFUSED, detail=why)
        chosen = request.arguments.get("action")
        if not isinstance(chosen, (str, int)) or isinstance(chosen, bool):
            why = f"An action is a text; found {chosen!r}."
            return ToolResult(why, CallOutcome.ERROR, detail=why, info=self._info())
        played = await self.play(str(chosen).strip())
        if isinstance(played, str):
            return ToolResult(played, CallOutcome.ERROR, detail=played, info=self._info())
        self._reward += played.reward
        self._return += played.reward
        self._over = played.over
        return ToolResult(self._texts.write(played.seen), CallOutcome.OK, info=self._info())

    def _info(self) -> dict[str, Any]:
        return {} if self.admissible is None else {"admissible": list(self.admissible)}

    def _measures(self) -> dict[str, float]:
        # Where steps cost, only an end is a success: before it, doing nothing has the highest return.
        reached = self._return >= self._success_return and (self._over or self._success_return > 0)
        return {"success": float(reached), "episode_return": self._return}


def reset_arguments(task: Task) -> dict[str, Any]:
    """Return the arguments of a reset: the task's ``metadata["seed"]`` and ``metadata["options"]``, where they are.
    Raises ValueError for other types."""
    seed, options = task.metadata.get("seed"), task.metadata.get("options")
    if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0)):
        raise ValueError(f"{task.id}: metadata.seed is {seed!r}; expected a whole number from 0 on")
    if not (options is None or isinstance(options, dict)):
        raise ValueError(f"{task.id}: metadata.options is {options!r}; expected an object")
    return {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
