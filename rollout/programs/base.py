"""Interface of agent programs: they ask the model for turns and return a reward or an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Protocol

from common.text import whole
from rollout.trajectory import Task, finite_number

KEYS = ("reward", "answer", "metrics")


class ProgramError(RuntimeError):
    """A program raised, died, or returned another type than a result."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program.

    Raises:
        RewardError: on construction, if the reward or a metric is not a finite number.
    """

    reward: float | None = None  # None: not scored; without a reward function the rollout is left out
    answer: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # parts of the reward, for the log

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", finite_number(self.reward, "the program's reward"))
        if self.answer is not None:
            object.__setattr__(self, "answer", whole(self.answer))
        numbers = {str(name): finite_number(value, f"the metric {name!r}") for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", numbers)

    @classmethod
    def of(cls, returned: Any) -> ProgramResult:
        """Convert a return value to a result: nothing, a text (the answer), a number (the reward), or a dict
        with some of reward, answer and metrics. Raises ProgramError for anything else."""
        if isinstance(returned, cls):
            return returned
        if returned is None:
            return cls()
        if isinstance(returned, str):
            return cls(answer=returned)
        if isinstance(returned, Number) or getattr(returned, "ndim", None) == 0:
            return cls(finite_number(returned, "the program's reward"))
        if not isinstance(returned, Mapping):
            raise ProgramError(f"it returned {type(returned).__name__}; expected a number, a text, a dict or None")
        answer, metrics = returned.get("answer"), returned.get("metrics") or {}
        if set(returned) - set(KEYS) or not isinstance(metrics, Mapping):
            raise ProgramError(
                f"it returned the keys {', '.join(map(str, returned))}; expected some of {', '.join(KEYS)}"
            )
        return cls(returned.get("reward"), None if answer is None else str(answer), dict(metrics))


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one rollout, as its program reaches it."""

    base_url: str  # for OPENAI_BASE_URL
    api_key: str  # OpenAI's clients want one; the address is the secret
    name: str
    chat: Callable[..., Awaitable[dict[str, Any]]]
    """``await model.chat(messages=[...], tools=[...])``: the chat completion as a dict, without HTTP. Takes the same
    options as ``POST /chat/completions``, in the rollout's event loop. Raises RequestError."""


class Program(Protocol):
    """An agent program. It may have ``async start()``, which runs, or fails, before a model loads.

    Attributes:
        failure_reward: reward of a rollout whose program fails (raises or dies, also at a limit of turns, tokens or
            time), unless it has posted a reward. ``None`` leaves such a rollout unscored.
    """

    failure_reward: float | None

    async def run(self, task: Task, model: Model) -> ProgramResult:
        """Play one task. Raises ProgramError if the program fails, TimeoutError when its time is over, and
        InfrastructureError if a service that it needs fails. Cancelled if the engine fails."""
        ...

    async def close(self) -> None: ...
