"""Limits around a tool: timeout, retries, concurrency, output length, cache."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from common.async_calls import PerLoop
from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.text import whole
from rollout.services.retries import with_retries
from rollout.tools.base import Bounded, OwnFault, Startable, Tool, own_faults
from rollout.trajectory import CallOutcome, InfrastructureError, ToolResult

logger = logging.getLogger(__name__)

CUT_MARK = "\n[...]"
ENDS_MATTER = (CallOutcome.ERROR, CallOutcome.TIMEOUT)  # the reason comes last


@dataclass(frozen=True)
class ToolLimits:
    """Limits of one tool: calls, time, retries, concurrency, length of results, cache."""

    max_calls: NonNegativeInt | None = None  # executed calls per trajectory; further ones are REFUSED
    timeout_s: PositiveFloat = 60.0  # per attempt; the call is cancelled, not abandoned
    timeout_is_infrastructure: bool = True  # False for tools that run the model's own code: then it is a TIMEOUT result
    retries: NonNegativeInt = 1  # further attempts, after InfrastructureError only, and not after PermanentFailure
    backoff_s: NonNegativeFloat = 0.5  # pause before the first retry; see ``pause_before_retry``
    concurrency: PositiveInt = 64  # attempts running at once, over all trajectories; fewer if the tool says so
    max_characters: PositiveInt = 20_000  # of the text that the model reads; errors lose their middle, others their end
    cache_size: NonNegativeInt = 0  # results kept, least recently used dropped; only for tools without side effects


class LimitedTool:
    """Wraps a tool and applies limits (time, retries, concurrency, length, cache) to its calls. One instance serves all
    trajectories of one event loop. After ``close``, or the end of the loop, it serves another; a second live loop gets
    a RuntimeError.

    With a cache, identical calls in flight share one execution. The environment counts ``max_calls``, because it knows
    the trajectory.
    """

    def __init__(self, tool: Tool, limits: ToolLimits) -> None:
        self.name, self.tool, self.limits = tool.name, tool, limits
        most = tool.concurrency if isinstance(tool, Bounded) else limits.concurrency
        self._slots = PerLoop(f"tool {tool.name}", lambda: asyncio.Semaphore(min(limits.concurrency, most)))
        self._cache = SharedCache(limits.cache_size) if limits.cache_size else None
        self._told: set[str] = set()  # logged faults of the tool

    async def start(self) -> None:
        """Start the wrapped tool, if it has a ``start``."""
        if isinstance(self.tool, Startable):
            await self.tool.start()

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the wrapped tool within its limits, and return its result. Raises InfrastructureError if every attempt
        failed, and PermanentFailure at once."""
        if self._cache is None:
            return await self._attempts(arguments)
        key = json.dumps(arguments, sort_keys=True, ensure_ascii=False, default=repr)
        return await self._cache.get(key, lambda: self._attempts(arguments))

    async def _attempts(self, arguments: dict[str, Any]) -> ToolResult:
        result = await with_retries(lambda: self._attempt(arguments), self.limits.retries, self.limits.backoff_s)
        return self._capped(result)

    async def _attempt(self, arguments: dict[str, Any]) -> ToolResult:
        async with self._slots.get():  # the deadline counts the work, not the queue
            deadline = asyncio.timeout(self.limits.timeout_s)
            try:
                async with deadline:
                    return await self._called(arguments)
            except TimeoutError as error:
                late = f"tool {self.name}: no result within {self.limits.timeout_s:g} s"
                if self.limits.timeout_is_infrastructure:
                    raise InfrastructureError(late) from error
                return ToolResult("The tool ran out of time.", CallOutcome.TIMEOUT, detail=late)

    async def _called(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the wrapped tool once, and return its result. A text is a result; the model reads any exception of the
        tool as an ERROR."""
        try:
            with own_faults():
                returned: Any = self.tool.call(arguments)  # a user's tool may return it without a coroutine
                return ToolResult.of(await returned if inspect.isawaitable(returned) else returned)
        except OwnFault as fault:
            if str(fault) not in self._told:
                self._told.add(str(fault))
                trace = whole("".join(traceback.format_exception(fault.__cause__)))  # a log file takes UTF-8 only
                logger.warning("tool %s failed, and the model reads so: %s\n%s", self.name, fault, trace)
            return ToolResult(f"The tool {self.name} failed: {fault}", CallOutcome.ERROR, detail=str(fault))

    def _capped(self, result: ToolResult) -> ToolResult:
        text, limit = result.text, self.limits.max_characters
        if len(text) <= limit:
            return result
        mark = CUT_MARK + "\n" if result.outcome in ENDS_MATTER else CUT_MARK
        kept = max(limit - len(mark), 0)
        tail = kept - kept // 2 if result.outcome in ENDS_MATTER else 0
        cut = text[: kept - tail] + mark + text[len(text) - tail :]
        return dataclasses.replace(result, text=cut[:limit])

    async def close(self) -> None:
        """Close the wrapped tool; a later call may come from another event loop."""
        self._slots.drop()
        await self.tool.close()


class SharedCache:
    """Caches tool results by key and drops the least recently used. Simultaneous requests for a key share one
    execution, also with size 0, which keeps no result.

    Only OK and EMPTY results are kept, because errors may heal. Cancelling one of several waiters does not disturb the
    others; cancelling the last one cancels the execution.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._results: OrderedDict[str, ToolResult] = OrderedDict()
        self._running: dict[str, asyncio.Task[ToolResult]] = {}
        self._waiting: dict[str, int] = {}

    async def get(self, key: str, compute: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(self._compute(key, compute))
        task = self._running[key]
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                task.cancel()  # no effect on a finished task
                if self._running.get(key) is task:
                    del self._running[key]  # so that a later request does not join a cancelled execution

    async def _compute(self, key: str, compute: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        result = await compute()
        if result.outcome in (CallOutcome.OK, CallOutcome.EMPTY):
            self._results[key] = result
            while len(self._results) > self.size:
                self._results.popitem(last=False)
        return result
