"""Question answering with tools as an environment, stateless except for the counts of calls."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from common.ranges import NonNegativeInt
from rollout.environments.base import Environment, StepResult
from rollout.tools.base import Tool
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.trajectory import (
    Action,
    CallOutcome,
    InfrastructureError,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Turn,
)

DEFAULT_LIMITS = ToolLimits()


class QuestionAnswering:
    """Environment factory for question answering with tools: makes one environment per trajectory. All share the tools,
    their queues and caches.

    Args:
        tools: tools by the name that the protocol uses.
        limits: limits of every tool that ``tool_limits`` does not name.
        tool_limits: limits of single tools, by name.
        max_calls: executed calls per trajectory over all tools together (ARPO's call_limit); further ones are REFUSED.
            None: only the limits of the tools.

    Raises:
        ValueError: ``tool_limits`` names a tool that is not in ``tools``.
    """

    def __init__(
        self,
        tools: dict[str, Tool],
        limits: ToolLimits = DEFAULT_LIMITS,
        tool_limits: dict[str, ToolLimits] | None = None,
        max_calls: NonNegativeInt | None = None,
    ) -> None:
        tool_limits = tool_limits or {}
        if unknown := sorted(set(tool_limits) - set(tools)):
            raise ValueError(f"tool_limits names {unknown}, but the tools are {sorted(tools)}")
        self.max_calls = max_calls
        self.tools = {name: LimitedTool(tool, tool_limits.get(name, limits)) for name, tool in tools.items()}

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Environment:
        return QuestionAnsweringEnvironment(self.tools, tools_enabled, self.max_calls)

    async def start(self) -> None:
        """Start the tools."""
        for tool in self.tools.values():
            await tool.start()

    async def close(self) -> None:
        """Close the tools."""
        for tool in self.tools.values():
            await tool.close()


class QuestionAnsweringEnvironment:
    """Environment of one question: runs the tool calls of a turn concurrently, and returns their results without a
    reward. A call whose service failed has outcome INFRASTRUCTURE: the trajectory records it with its latency, and the
    agent loop ends the trajectory there."""

    def __init__(self, tools: dict[str, LimitedTool], tools_enabled: bool, max_calls: int | None = None) -> None:
        self._tools, self._enabled, self._max_calls = tools, tools_enabled, max_calls
        self._used: Counter[str] = Counter()

    async def reset(self) -> None:
        return None

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float | None:
        """Continue an episode after earlier tool ``calls``. The executed ones count for the limits. Returns None: no
        reward is known yet."""
        self._used = Counter(call.request.name for call in calls if call.executed)
        return None

    async def step(self, action: Action) -> StepResult:
        # Refusals are decided in order, before any call runs, so that they do not depend on the calls' speed.
        refusals = [self._refusal(request) for request in action.calls]
        runs = [self._run(request, refusal) for request, refusal in zip(action.calls, refusals, strict=True)]
        timed = [await runs[0]] if len(runs) == 1 else await asyncio.gather(*runs)  # one needs no task
        return StepResult(tuple(result for result, _ in timed), tuple(seconds for _, seconds in timed))

    def _refusal(self, request: ToolRequest) -> ToolResult | None:
        """Return the refusal of a tool call, or None if the call may run and was counted."""
        tool = self._tools.get(request.name)
        if not self._enabled:
            why = f"{request.name} is not available here."
        elif tool is None:
            why = f"There is no tool named {request.name}."
        elif tool.limits.max_calls is not None and self._used[request.name] >= tool.limits.max_calls:
            why = f"No further call of {request.name} is allowed (limit: {tool.limits.max_calls})."
        elif self._max_calls is not None and self._used.total() >= self._max_calls:
            why = f"No further tool call is allowed (limit: {self._max_calls})."
        else:
            self._used[request.name] += 1
            return None
        return ToolResult(why, CallOutcome.REFUSED, detail=why)

    async def _run(self, request: ToolRequest, refusal: ToolResult | None) -> tuple[ToolResult, float]:
        if refusal is not None:
            return refusal, 0.0
        began = time.monotonic()
        try:
            result = await self._tools[request.name].call(request.arguments)
        except InfrastructureError as error:
            result = ToolResult("", CallOutcome.INFRASTRUCTURE, detail=str(error))
        if result.outcome is CallOutcome.REFUSED:
            self._used[request.name] -= 1  # the tool declined (an empty query) and executed nothing
        return result, time.monotonic() - began

    async def close(self) -> None:
        """Close nothing: the tools belong to the factory."""


async def one_by_one(step: Callable[[Action], Awaitable[StepResult]], action: Action) -> StepResult:
    """Execute the calls of an action in order, each after the one before, for tools that share a state."""
    steps = [await step(dataclasses.replace(action, calls=(request,))) for request in action.calls]
    return StepResult(
        tuple(result for one in steps for result in one.results),
        tuple(seconds for one in steps for seconds in one.latencies_s),
    )
