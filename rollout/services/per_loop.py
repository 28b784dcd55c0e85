"""Objects that belong to one event loop at a time, such as connections and semaphores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
        """Forget the object. Return it if it belongs to the running loop."""
        made = self._made if self._loop is asyncio.get_running_loop() else None
        self._loop = self._made = None
        return made
