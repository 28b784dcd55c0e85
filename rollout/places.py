"""Who may be under way: a semaphore whose queue has an order, and whose places can be left for a while."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable


Priority = int | tuple[int, int]  # of one kind within one object


class Places:
    """At most ``count`` holders at once. Who waits is let in by priority, the lowest first, then in order of arrival,
    so that the forks of a prompt come before the prompts behind it. Belongs to one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._order = itertools.count()
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []

    def take(self, priority: Priority) -> Place:
        return Place(self, priority)

    async def acquire(self, priority: Priority) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was handed over in the same moment
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._free += 1


class Place:
    """One place, as an asynchronous context manager."""

    def __init__(self, places: Places, priority: Priority) -> None:
        self._places, self._priority = places, priority
        self._held = False

    async def __aenter__(self) -> Place:
        await self._places.acquire(self._priority)
        self._held = True
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._held:
            self._places.release()

    async def away(self, work: Awaitable[None]) -> None:
        """Leave the place to others until ``work`` is done, then wait for one. If ``work`` raises, it stays left."""
        self._places.release()
        self._held = False
        await work
        await self.__aenter__()
