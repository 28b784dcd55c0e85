"""Pauses between attempts, and objects that belong to one event loop at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_DRAWS = random.Random()  # a separate generator: pauses must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Return the seconds to wait before retry number ``retry`` (from 1). The wait doubles with each retry, from
    ``base_s``; a random factor between 0.5 and 1.5 keeps many callers from retrying at the same moment."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)


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
