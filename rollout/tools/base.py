"""Protocol of a tool. Limits (calls, timeout, retries, concurrency) are applied around it by ``LimitedTool``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rollout.trajectory import ToolResult


class Tool(Protocol):
    name: str

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run once. Failures caused by the arguments are results (ERROR, EMPTY, TIMEOUT); failures of a service
        raise InfrastructureError."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A tool or runner that is no quicker with more calls at once; the others wait, and their deadline with them."""

    @property
    def concurrency(self) -> int: ...


@runtime_checkable
class Startable(Protocol):
    """A tool, runner or environment factory that can fail before the first call, and should: before a model loads."""

    async def start(self) -> None:
        """Idempotent. Raises what makes every later call pointless."""
        ...
