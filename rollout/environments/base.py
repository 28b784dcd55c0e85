"""The seam between an action and the world. Single use: one environment, one trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollout.trajectory import Action, Task, ToolResult


@dataclass(frozen=True, slots=True)
class StepResult:
    results: tuple[ToolResult, ...]  # one per call of the action, in order
    latencies_s: tuple[float, ...]
    done: bool = False
    reward: float | None = None  # environments that score themselves; question answering leaves it None


class Environment(Protocol):
    async def reset(self) -> str | None:
        """Opening observation, or None when the task's prompt says it all."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Execute one action. Raises InfrastructureError when a service fails."""
        ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Environment: ...
