"""An event loop whose clock jumps: sleeping takes no time, and every duration is exact on any machine."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for a timer, sets the clock forward to it. Waits only where nothing is timed, for what other
    threads send."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Not for code that hands work to other threads while a timer runs: the clock does not wait for them."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jump.now


def run(main: Any) -> Any:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
