"""The seam between an action and the world. Single use: one environment, one trajectory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.trajectory import Action, Task, ToolRequest, ToolResult

# Keys of a task's metadata that describe its own world, which scores itself: such a task needs no gold answer.
WORLDS = ("household", "shopping")
SHOWN_PROBLEMS = 5  # of the tasks that a world refuses
ACT = "act"  # the one tool of such a world: ToolRequest("act", {"action": "go to desk 1"})


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment that scores itself shows before the first action. It takes the place of the question."""

    text: str
    info: dict[str, Any] = field(default_factory=dict)  # facts for prompts and metrics, plain JSON: {"admissible": ...}
    measures: dict[str, float] = field(default_factory=dict)  # of an episode that ends before its first step


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to. A result whose outcome is INFRASTRUCTURE ends the trajectory as raising
    InfrastructureError does, and keeps the failed call in the record."""

    results: tuple[ToolResult, ...]  # one per call of the action, in order
    latencies_s: tuple[float, ...]
    done: bool = False
    reward: float | None = None  # summed over the episode; question answering, which is scored afterwards, has none
    # What the episode has come to so far, replacing earlier steps': parts of the reward, such as {"success": 1.0}.
    measures: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    async def reset(self) -> Opening | None:
        """Opening observation, or None when the task's prompt says it all. Raises as ``step``."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Execute one action. Raises InfrastructureError when a service fails."""
        ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    """Makes one environment per trajectory, and owns what they share (tools, simulators).

    Annotated to return Any where it returns an Environment: jsonargparse takes a protocol whose ``__call__`` returns a
    class for a factory of that class, and would refuse every factory object.
    """

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Any: ...

    async def close(self) -> None: ...


async def act_in_order(
    action: Action, act: Callable[[ToolRequest], Awaitable[ToolResult]]
) -> tuple[tuple[ToolResult, ...], tuple[float, ...]]:
    """The calls of an action, one after the other, in a world that the earlier of them change: results and seconds."""
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
    """Why a world that knows ``ACT`` alone takes no notice of a request; None: it does. ``over``: what it says once the
    episode is at its end, None before."""
    if not enabled:
        return f"{request.name} is not available here."
    return over if request.name == ACT else f"There is no tool named {request.name}."
