"""SIGUSR1: stop at the next checkpoint. What a batch system sends some minutes before a job's time is up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from callbacks.training import stop_request


class StopSignal:
    """Hands the signal on to the training in progress; without one (a task, a test) the stage is made to its end."""

    def __init__(self) -> None:
        self.received = False
        self._folder: Path | None = None

    def install(self) -> None:
        """Take SIGUSR1 from now on, which would end this process otherwise."""
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.received:
            print("\nSIGUSR1: stopping after this iteration, with a checkpoint", flush=True)
        self.received = True
        if self._folder is not None:
            stop_request.ask(self._folder)

    @contextmanager
    def working_in(self, folder: Path) -> Iterator[None]:
        """The stage whose training is to be stopped."""
        self._folder = folder
        if self.received:
            stop_request.ask(folder)
        try:
            yield
        finally:
            self._folder = None
