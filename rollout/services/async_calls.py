"""Helpers of asynchronous calls: retries with backoff, and objects that belong to one event loop at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rollout.trajectory import InfrastructureError, PermanentFailure

T = TypeVar("T")

_DRAWS = random.Random()  # a separate generator: pauses must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Return seconds before retry number ``retry`` (from 1): ``base_s * 2**(retry - 1)``, times a random factor between
    0.5 and 1.5, so that many callers do not return to a service at the same moment."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)


async def with_retries(attempt: Callable[[], Awaitable[T]], retries: int, backoff_s: float) -> T:
    """Await ``attempt()``, and again after an InfrastructureError other than a PermanentFailure. Raises the last error.

    A loop, because tenacity takes a third of a turn's processor time for a tool call that succeeds at once, and draws
    its jitter from the global generator.

    Args:
        retries: further attempts after the first.
        backoff_s: seconds before the first retry, see ``pause_before_retry``.
    """
    for retry in range(1, retries + 1):
        try:
            return await attempt()
        except PermanentFailure:
            raise
        except InfrastructureError:
            await asyncio.sleep(pause_before_retry(retry, backoff_s))
    return await attempt()


class PerLoop(Generic[T]):
    """Holds one object, made for the event loop that asks first. A later loop gets a new object.

    Args:
        owner: the user of the object, for messages.
        make: makes the object; called in the loop.
    """

    def __init__(self, owner: str, make: Callable[[], T]) -> None:
        self._owner, self._make = owner, make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made: T | None = None

    def get(self) -> T:
        """Return the running loop's object. Raises RuntimeError while another live loop has one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._made is None:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(f"{self._owner} serves one event loop at a time; make one per loop, or close it")
            self._loop, self._made = loop, self._make()
        return self._made

    def drop(self) -> T | None:
        """Remove the stored object. Return it if it belongs to the running loop."""
        made = self._made if self._loop is asyncio.get_running_loop() else None
        self._loop = self._made = None
        return made
