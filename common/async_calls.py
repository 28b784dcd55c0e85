"""Pauses between attempts, objects that belong to one event loop at a time, and an event loop in a thread."""

from __future__ import annotations

import asyncio
import importlib
import random
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_DRAWS = random.Random()  # a separate generator: pauses must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Return the seconds to wait before retry number ``retry`` (from 1). The wait doubles with each retry, from
    ``base_s``; a random factor between 0.5 and 1.5 keeps many callers from retrying at the same moment."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)


def holdable(error: BaseException) -> BaseException:
    """Return an error as asyncio's futures can hold it. They refuse StopIteration, so that what awaits them would wait
    forever."""
    return RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error


def raising_holdable(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function whose StopIteration becomes a RuntimeError (``holdable``)."""

    def call(*arguments: Any, **options: Any) -> T:
        try:
            return function(*arguments, **options)
        except StopIteration as stop:
            raise holdable(stop) from stop

    return call


async def in_thread(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a user's function in a thread, as ``asyncio.to_thread``; a StopIteration becomes a RuntimeError."""
    return await asyncio.to_thread(raising_holdable(function), *arguments, **options)


class PerLoop(Generic[T]):
    """Holds one object for one event loop at a time, created when first asked for. A later loop gets a new object.

    Args:
        owner: the user of the object, for messages.
        make: makes the object; called in the loop.
    """

    def __init__(self, owner: str, make: Callable[[], T]) -> None:
        self._owner, self._make = owner, make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made: T | None = None

    def get(self) -> T:
        """Return the running event loop's object, created if necessary. Raises RuntimeError while another live loop has
        one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._made is None:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(f"{self._owner} serves one event loop at a time; make one per loop, or close it")
            self._loop, self._made = loop, self._make()
        return self._made

    def drop(self) -> T | None:
        """Remove the stored object, and return it if it belongs to the running event loop (else None)."""
        made = self._made if self._loop is asyncio.get_running_loop() else None
        self._loop = self._made = None
        return made


class EventLoopThread:
    """An asyncio event loop in a daemon thread. Ctrl-C ends a wait for its results."""

    def __init__(self, name: str) -> None:
        importlib.import_module("polars")  # its import sets SA_RESTART for SIGINT: Ctrl-C would not end a wait
        signal.siginterrupt(signal.SIGINT, True)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of ``function`` in the event loop, without waiting for it."""
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
