"""Protocol of a tool. ``LimitedTool`` applies limits around it (calls, timeout, retries, concurrency)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from common.errors import one_line
from common.text import whole
from rollout.trajectory import InfrastructureError, RewardError, ToolResult


class OwnFault(Exception):
    """User code (a tool or an environment) raised an exception; the message names the exception."""


@contextmanager
def own_faults() -> Iterator[None]:
    """Turn exceptions of user code in the block into OwnFault, also ``SystemExit``, and a ``CancelledError`` without a
    cancellation. InfrastructureError, RewardError, Ctrl-C and a real cancellation pass."""
    try:
        yield
    except (InfrastructureError, RewardError):
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise OwnFault(whole(one_line(f"{type(error).__name__}: {error}")).removesuffix(":")) from error


class Tool(Protocol):
    name: str

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run the tool once and return its result for the model. Failures caused by the arguments are results (ERROR,
        EMPTY, TIMEOUT); failures of a service raise InfrastructureError. The model reads any other exception as an
        ERROR, and a text as an OK result."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A tool or runner with a limited number of parallel calls. Further calls wait, and their deadline with them."""

    @property
    def concurrency(self) -> int: ...


@runtime_checkable
class Startable(Protocol):
    """A tool, runner or environment factory with a ``start`` that runs, or fails, before a model loads."""

    async def start(self) -> None:
        """Prepare for calls. Idempotent. Raises errors that make every later call pointless."""
        ...
