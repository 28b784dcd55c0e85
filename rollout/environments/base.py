"""The environment seam: one object per trajectory executes its actions and returns their results."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.text import plain_json, whole
from rollout.trajectory import Action, Task, ToolRequest, ToolResult

SHOWN_PROBLEMS = 5  # of the tasks that an environment refuses
ACT = "act"  # the one tool of an environment that takes plain actions: ToolRequest("act", {"action": "go to desk 1"})


@dataclass(frozen=True, slots=True)
class FirstObservation:
    """What an environment that scores itself shows before the first action, instead of a question."""

    text: str
    info: dict[str, Any] = field(default_factory=dict)  # facts for prompts and metrics, plain JSON: {"admissible": ...}
    measures: dict[str, float] = field(default_factory=dict)  # of an episode that ends before its first step

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of a FirstObservation is {type(self.text).__name__}; expected str")
        object.__setattr__(self, "text", whole(self.text))
        object.__setattr__(self, "info", plain_json(self.info, "info"))
        object.__setattr__(self, "measures", dict(self.measures))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to. A result whose outcome is INFRASTRUCTURE ends the trajectory as raising
    InfrastructureError does, and keeps the failed call in the record. A result may be a text (``ToolResult.of``)."""

    results: tuple[ToolResult, ...]  # one per call of the action, in order
    latencies_s: tuple[float, ...]
    done: bool = False
    reward: float | None = None  # summed over the episode; question answering, which is scored afterwards, has none
    # What the episode has come to so far, replacing earlier steps': parts of the reward. Tables read {"success": 1.0}.
    measures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", tuple(map(ToolResult.of, self.results)))
        object.__setattr__(self, "latencies_s", tuple(map(float, self.latencies_s)))
        if not all(map(math.isfinite, self.latencies_s)):
            raise ValueError(
                f"the latencies of a StepResult are {self.latencies_s}; expected finite numbers of seconds"
            )
        object.__setattr__(self, "measures", dict(self.measures))


class Environment(Protocol):
    """One episode. With a method ``resume`` (``loop.agent_loop.Resumable``) its trajectories can be forked."""

    async def reset(self) -> FirstObservation | None:
        """The first observation, or None when the task's prompt says it all. Raises as ``step``."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Execute one action. Raises InfrastructureError when a service fails."""
        ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    """Makes one environment per trajectory, and owns what they share (tools, simulators).

    A factory may say more of itself; nothing else in the project knows its name:

    - ``scores_itself = True``: its episodes end with a reward of their own, so its tasks need no gold answer.
    - ``tools``: the names of the tools that it executes; a protocol that calls others is refused.
    - ``check(tasks)``: raises ValueError for tasks that it cannot play, before a model loads.
    - ``verdicts(trajectory)``: of each turn of a finished trajectory whether it was right, None where that cannot be
      said: an expert's opinion, for ``make preconditions`` alone; no training reads it.
    - ``async start()``: what takes time, before the first episode.

    ``__call__`` is annotated to return Any where it returns an Environment: jsonargparse takes a protocol whose
    ``__call__`` returns a class for a factory of that class, and would refuse every factory object.
    """

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any: ...

    async def close(self) -> None: ...


def scores_itself(environment: EnvironmentFactory) -> bool:
    """Whether the environment says that its episodes end with a reward of their own."""
    return bool(getattr(environment, "scores_itself", False))


def check_tools(environment: object, called: Iterable[str], caller: str) -> None:
    """Raises ValueError where ``caller`` calls tools that the environment, if it says which it has, does not name."""
    called = tuple(called)
    there = getattr(environment, "tools", called)
    if missing := sorted(set(called) - set(there)):
        name = getattr(environment, "__name__", type(environment).__name__)  # of the class itself, before it is built
        own = f"name it in the `tools` of the class {name} and execute it in `step`"
        raise ValueError(
            f"{caller} calls the tools {', '.join(called)}, but the environment has none named {', '.join(missing)}; "
            + ("add it to environment.tools" if isinstance(there, dict) else own)
        )


async def act_in_order(
    action: Action, act: Callable[[ToolRequest], Awaitable[ToolResult]]
) -> tuple[tuple[ToolResult, ...], tuple[float, ...]]:
    """Execute the calls of an action one after the other, where each changes the world: results and seconds."""
    results, latencies = [], []
    for request in action.calls:
        began = time.monotonic()
        results.append(await act(request))
        latencies.append(time.monotonic() - began)
    return tuple(results), tuple(latencies)


def check_tasks(tasks: Iterable[Task], look: Callable[[Task], object], what: str) -> None:
    """Look at every task. Raises ValueError with the first messages of the ValueErrors that ``look`` raises, a line
    each under ``what``, if there are any."""
    problems = []
    for task in tasks:
        try:
            look(task)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise ValueError("\n".join([f"{what}:", *problems[:SHOWN_PROBLEMS], *more]))


def refusal(request: ToolRequest, enabled: bool, over: str | None) -> str | None:
    """Why an environment that knows ``ACT`` alone does not execute a request; None: it does. ``over``: what it says
    once the episode has ended, None before."""
    if not enabled:
        return f"{request.name} is not available here."
    return over if request.name == ACT else f"There is no tool named {request.name}."
