"""Restarts of a process that has died: how often, and the loop that tries until the next one runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from common.errors import one_line

HOUR_S = 3600.0
Result = TypeVar("Result")


class RestartsUsedUp(Exception):
    """Raised if a process died more often than its limit of restarts. The message says why it died the last time."""


class Restarts:
    """Limits how often a dead process is restarted: at most ``limit`` times within any hour."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._times: deque[float] = deque()  # of the restarts within the last hour

    def take(self) -> bool:
        """Count one restart, and return whether it is allowed."""
        now = time.monotonic()
        while self._times and now - self._times[0] > HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    def revive(
        self,
        start: Callable[[str], Result],
        why: str,
        closing: threading.Event,
        pause_s: float,
        errors: tuple[type[Exception], ...] = (Exception,),
    ) -> Result | None:
        """Restart a process: call ``start`` until it succeeds, and return its result. Returns None once ``closing`` is
        set.

        Args:
            start: starts the next process; is given why the last one died.
            why: the reason of the first death.
            pause_s: seconds between a failed start and the next one.
            errors: exceptions of ``start`` after which it is called again.

        Raises:
            RestartsUsedUp: the limit is reached.
        """
        while not closing.is_set():
            if not self.take():
                raise RestartsUsedUp(why + self.used_up())
            try:
                return start(why)
            except errors as error:
                why = f"its restart failed: {one_line(error)}"
                closing.wait(pause_s)
        return None

    def __str__(self) -> str:
        return f"{len(self._times)} of {self.limit} within an hour"

    def used_up(self) -> str:
        """Return the end of an error message about the reached limit of restarts, or "" if no restart was allowed."""
        times = "once" if self.limit == 1 else f"{self.limit} times"
        return f"; it was restarted {times} within an hour (option restarts)" if self.limit else ""
