"""How often a process that has died may be started anew."""

from __future__ import annotations

import time
from collections import deque

HOUR_S = 3600.0


class Restarts:
    """At most ``limit`` within any hour."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"expected restarts >= 0; found {limit}")
        self.limit = limit
        self._times: deque[float] = deque()  # within the last hour

    def take(self) -> bool:
        """Count one; False where it would be one too many."""
        now = time.monotonic()
        while self._times and now - self._times[0] > HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    def __str__(self) -> str:
        return f"{len(self._times)} of {self.limit} within an hour"

    def used_up(self) -> str:
        """Words for a message that it is over; none where nothing may be started anew."""
        times = "once" if self.limit == 1 else f"{self.limit} times"
        return f"; it was started anew {times} within an hour (option restarts)" if self.limit else ""
