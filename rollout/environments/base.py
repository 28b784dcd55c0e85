"""Protocol of environments: one object per trajectory executes its actions and returns their results."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.text import plain_json, whole
from rollout.trajectory import Action, Task, ToolRequest, ToolResult

SHOWN_PROBLEMS = 5  # refused tasks that a message shows
ACT = "act"  # the one tool of an environment that takes plain actions: ToolRequest("act", {"action": "go to desk 1"})


@dataclass(frozen=True, slots=True)
class FirstObservation:
    """First observation of an environment that scores itself, shown before the first action instead of a question."""

    text: str
    info: dict[str, Any] = field(default_factory=dict)  # facts for prompts and metrics, plain JSON: {"admissible": ...}
    measures: dict[str, float] = field(default_factory=dict)  # if the episode ends before its first action

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of a FirstObservation is {type(self.text).__name__}; expected str")
        object.__setattr__(self, "text", whole(self.text))
        object.__setattr__(self, "info", plain_json(self.info, "info"))
        object.__setattr__(self, "measures", dict(self.measures))


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's result of one action. A tool result with outcome INFRASTRUCTURE ends the trajectory, as raising
    InfrastructureError does, and keeps the failed call in the record. A tool result may be a text
    (``ToolResult.of``)."""

    results: tuple[ToolResult, ...]  # one per call of the action, in order
    latencies_s: tuple[float, ...]
    done: bool = False
    reward: float | None = None  # summed over the episode; question answering has None, because it is scored afterwards
    # Measures of the episode so far. They replace those of earlier actions and become parts of the reward, such as
    # {"success": 1.0}.
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
    """One episode: executes the agent's actions and returns results, as in Gymnasium. With a method ``resume``
    (``loop.agent_loop.Resumable``) its trajectories can be forked."""

    async def reset(self) -> FirstObservation | None:
        """Start the episode. Returns the first observation, or None when the task's prompt is complete. Raises as
        ``step``."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Execute one action and return its results. Raises InfrastructureError when a service fails."""
        ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    """Makes one environment per trajectory, and owns shared resources (tools, simulators).

    A factory may have these optional members:

    - ``scores_itself = True``: its episodes end with a reward, so its tasks need no gold answer.
    - ``tools``: the names of the tools that it executes; a protocol that calls others is refused.
    - ``check(tasks)``: raises ValueError for tasks that it cannot play, before a model loads.
    - ``verdicts(trajectory)``: says of each turn of a finished trajectory whether it was right, None if unknown. Only
      ``make preconditions`` reads this expert's opinion; no training does.
    - ``async start()``: slow preparation, before the first episode.

    Annotate ``__call__`` to return Any, not an Environment: jsonargparse takes a protocol whose ``__call__`` returns a
    class for a factory of that class, and would refuse every factory object.
    """

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any: ...

    async def close(self) -> None: ...


def scores_itself(environment: EnvironmentFactory) -> bool:
    """Return whether the environment rewards its own episodes, without a reward function."""
    return bool(getattr(environment, "scores_itself", False))


def check_tools(environment: object, called: Iterable[str], caller: str) -> None:
    """Raise ValueError if a tool in ``called`` is missing in the environment. An environment that does not name its
    tools passes."""
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
    """Execute the calls of an action one after the other, because each changes the environment. Returns the results,
    and the seconds of each call."""
    results, latencies = [], []
    for request in action.calls:
        began = time.monotonic()
        results.append(await act(request))
        latencies.append(time.monotonic() - began)
    return tuple(results), tuple(latencies)


def check_tasks(tasks: Iterable[Task], look: Callable[[Task], object], what: str) -> None:
    """Check every task with ``look``, which raises ValueError for a bad task. Raises ValueError with the first
    messages, one per line under ``what``."""
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
    """Return the error message for a request to an environment whose only tool is ``ACT``, or None if the request is
    valid.

    Args:
        over: the reason once the episode has ended, None before.
    """
    if not enabled:
        return f"{request.name} is not available here."
    return over if request.name == ACT else f"There is no tool named {request.name}."
