"""SIGUSR1: stop at the next checkpoint. What a batch system sends some minutes before a job's time is up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from callbacks import stop_request


class StopSignal:
    """Hands the request on to the training under way; without one (a task, a test) the stage is made to its end."""

    def __init__(self) -> None:
        self.received = False
        self._folder: Path | None = None

    def install(self, then: Callable[[], None] = lambda: None) -> None:
        """Take SIGUSR1 from now on, which would end this process otherwise; ``then`` is called as well."""

        def handle(signum: int, frame: FrameType | None) -> None:
            self.receive()
            then()

        signal.signal(signal.SIGUSR1, handle)

    def receive(self) -> None:
        if not self.received:
            print("\nSIGUSR1: stopping after this iteration, with a checkpoint", flush=True)
        self.received = True
        if self._folder is not None:
            stop_request.ask(self._folder)

    @contextmanager
    def working_in(self, folder: Path) -> Iterator[None]:
        """The stage whose training a request is for. What an earlier one has left there is removed."""
        stop_request.forget(folder)
        self._folder = folder
        if self.received:
            stop_request.ask(folder)
        try:
            yield
        finally:
            self._folder = None
