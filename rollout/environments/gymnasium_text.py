"""Gymnasium environments whose observations and actions are written as text.

Source: the interface of Gymnasium 1.x (gymnasium.farama.org), through the package ``gymnasium``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from common.async_calls import in_thread
from common.ranges import FiniteFloat
from rollout.environments.base import ACT, check_tasks
from rollout.environments.text_episode import Played, TextEpisode, Texts, reset_arguments
from rollout.trajectory import Task


class GymnasiumText:
    """Environment factory: one Gymnasium environment per trajectory, played in text through ``EpisodeProtocol``.

    The reward is the sum of the environment's rewards. A task's ``metadata["seed"]`` and ``metadata["options"]`` go to
    ``reset`` (``SeedTasks`` writes such tasks). Calls run in threads.

    Args:
        environment: a registered id, or ``package.module:Id-v0``, which imports the module that registers it.
        options: keyword arguments of ``gymnasium.make``.
        actions: words for the actions of a ``Discrete`` space, in order; null: their numbers. An environment with a
            ``Text`` space takes the agent's words themselves. For other spaces write a wrapper.
        observation: text of an observation (``text_episode.Texts``).
        first: text of the first observation; null: as ``observation``.
        success_return: an episode succeeds if its rewards sum up to at least this.

    Raises:
        ValueError: an unknown environment, actions or a text that do not fit it.
    """

    scores_itself = True
    tools = (ACT,)

    def __init__(
        self,
        environment: str,
        options: dict[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        observation: str = "{observation}",
        first: str | None = None,
        success_return: FiniteFloat = 1.0,
    ) -> None:
        self.environment, self.options, self.success_return = environment, options or {}, success_return
        self.texts = Texts(observation, observation if first is None else first)
        made = self.make()
        try:
            self.actions = _actions(made.action_space, actions, environment)
            seen, _ = made.reset(seed=0)
            for is_first in (True, False):
                self.texts.write(seen, is_first)
        finally:
            made.close()

    def make(self) -> gymnasium.Env[Any, Any]:
        try:
            return gymnasium.make(self.environment, **self.options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"environment {self.environment} cannot be made with {self.options}: {error}") from error

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any:
        return GymnasiumEpisode(self, task, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Raise ValueError for tasks whose seed or options ``reset`` cannot take."""
        check_tasks(tasks, reset_arguments, "tasks that a Gymnasium environment cannot play")

    async def close(self) -> None: ...


class GymnasiumEpisode(TextEpisode):
    def __init__(self, factory: GymnasiumText, task: Task, enabled: bool) -> None:
        super().__init__(factory.texts, factory.success_return, enabled)
        self._factory, self._task = factory, task
        self._actions = factory.actions
        self.admissible = None if factory.actions is None else list(factory.actions)
        self._environment: gymnasium.Env[Any, Any] | None = None

    async def open(self) -> Any:
        self._environment = await in_thread(self._factory.make)
        seen, _ = await in_thread(self._environment.reset, **reset_arguments(self._task))
        return seen

    async def play(self, action: str) -> Played | str:
        chosen: Any = action
        if self._actions is not None:
            if action.lower() not in self._actions:
                return f"There is no action {action}. The actions are: {', '.join(self._actions)}."
            chosen = self._actions[action.lower()]
        assert self._environment is not None
        seen, reward, ended, cut, _ = await in_thread(self._environment.step, chosen)
        return Played(seen, float(reward), bool(ended or cut))

    async def close(self) -> None:
        if self._environment is not None:
            await in_thread(self._environment.close)


def _actions(space: Any, words: Sequence[str] | None, environment: str) -> dict[str, int] | None:
    """Return the actions by their words; None: any text is an action."""
    if isinstance(space, Text) and words is None:
        return None
    if not isinstance(space, Discrete):
        raise ValueError(
            f"{environment} takes actions of {space}; expected a Discrete space, or a Text space without `actions` "
            "(write a wrapper that reads the action from a text)"
        )
    numbers = range(int(space.start), int(space.start + space.n))
    chosen = [str(word).lower() for word in words or numbers]
    if not len(set(chosen)) == len(chosen) == space.n:
        raise ValueError(f"actions are {', '.join(chosen)}; expected {space.n} different words for {environment}")
    return dict(zip(chosen, numbers, strict=True))
