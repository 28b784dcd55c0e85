"""Stops at the next checkpoint after SIGUSR1, which batch systems send before the end of a job's time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from callbacks.training import stop_request


class StopSignal:
    """Handles SIGUSR1: asks the training in progress to stop with a checkpoint. Tasks and tests run to their end."""

    def __init__(self) -> None:
        self.received = False
        self._folder: Path | None = None

    def install(self) -> None:
        """Install the handler of SIGUSR1, which would end this process by default."""
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.received:
            print("\nSIGUSR1: stopping after this iteration, with a checkpoint", flush=True)
        self.received = True
        if self._folder is not None:
            stop_request.ask(self._folder)

    @contextmanager
    def working_in(self, folder: Path) -> Iterator[None]:
        """Context manager that names the folder of the stage that runs during the block, so that SIGUSR1 stops this
        stage."""
        self._folder = folder
        if self.received:
            stop_request.ask(folder)
        try:
            yield
        finally:
            self._folder = None
