"""An HTTP session for one event loop at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import aiohttp

from common.async_calls import PerLoop


class LoopSession:
    """An aiohttp client session for one event loop at a time. A new event loop gets new connections.

    Args:
        owner: the class that uses it, for messages.
        slots: requests in flight at once, or None for no limit.
        connector: makes the connection pool. The default pool is aiohttp's without its limit, because waiting for a
            free connection would count as the service's time.
    """

    def __init__(
        self, owner: str, slots: int | None = None, connector: Callable[[], aiohttp.BaseConnector] | None = None
    ) -> None:
        connect = connector or (lambda: aiohttp.TCPConnector(limit=0))

        def make() -> tuple[aiohttp.ClientSession, AbstractAsyncContextManager[Any]]:
            session = aiohttp.ClientSession(
                connector=connect(), timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
            )
            return session, nullcontext() if slots is None else asyncio.Semaphore(slots)

        self._held = PerLoop(owner, make)

    def open(self) -> tuple[aiohttp.ClientSession, AbstractAsyncContextManager[Any]]:
        """Return the running event loop's session, and a context manager that bounds the requests in flight."""
        return self._held.get()

    async def close(self) -> None:
        """Close the session's connections. A later use opens new ones."""
        if held := self._held.drop():
            await held[0].close()
