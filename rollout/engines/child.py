"""One process of an engine (`worker.py`) and the pipe to it: what is written, what is read, and whether it lives."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout.trajectory import InfrastructureError

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package `rollout`
LOOK_S = 1.0  # between looks at a process, at most; worker.py's BEAT_S is as long
SILENT = "its process gave no sign of life for {:g} s (option heartbeat_timeout_s), and was killed"

Results = list[tuple[int, Any]]  # (number of the message, what came of it)
TakesResults = Callable[[Results], None]


class Child:
    """Spawned by the constructor, never forked. Then `ready`, `ask` any number of times, and `begin`."""

    def __init__(self, first: tuple[Any, ...], environment: Mapping[str, str], parent: int) -> None:
        """``first``: the message that says what to build. ``parent``: the process with which it ends."""
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout.engines.worker", str(theirs.fileno()), str(parent)],
            pass_fds=[theirs.fileno()],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print belongs to the log, not among the command's results
        )
        theirs.close()
        self._first, self._connection = first, Connection(ours.detach())
        self._outbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._heard = 0  # messages so far
        self.trace: str | None = None  # of the exception that ended it
        self._hung: str | None = None  # why it was killed from here
        self._gone = threading.Event()
        self._reader: threading.Thread | None = None
        self._writer = threading.Thread(target=self._write, daemon=True, name="engine-writer")

    @property
    def hung(self) -> bool:
        """Whether it was killed from here, as before it is ready only for silence."""
        return self._hung is not None

    def ready(self, timeout_s: float, limit_s: float = math.inf) -> dict[str, Any]:
        """Wait until the model is loaded, at most ``limit_s``, and ``timeout_s`` without a sign of life; what the child
        says of it.

        Raises:
            ValueError: the options do not fit the model.
            InfrastructureError: it has ended, or was not ready in time and has been killed.
        """
        content: Any = None
        kind = "fatal"
        with contextlib.suppress(EOFError, OSError):
            self._connection.send(self._first)
            kind, content = self._receive(timeout_s, limit_s)
        if kind == "ready":
            return content
        if kind == "refused":
            raise ValueError(content)
        self.trace = content
        raise InfrastructureError(self.describe_death())

    def ask(self, *message: Any, timeout_s: float) -> Any:
        """What comes of one message, before `begin`. Raises InfrastructureError as `ready`."""
        try:
            self._connection.send(message)
            while True:
                kind, content = self._receive(timeout_s)
                if kind == "results":
                    return content[0][1]
                if kind == "fatal":
                    self.trace = content
        except (EOFError, OSError):
            raise InfrastructureError(self.describe_death()) from None

    def begin(
        self,
        results: TakesResults,
        ended: Callable[[Child], None],
        busy: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """From now on threads of its own write what is sent, give ``results`` on, kill it when it has been ``busy``
        without a sign of life for ``timeout_s``, and call ``ended`` when it is gone, in the thread that has read."""
        self._reader = threading.Thread(target=self._read, args=(results, ended), daemon=True, name="engine-reader")
        for thread in (
            self._writer,
            threading.Thread(target=self._watch, args=(busy, timeout_s), daemon=True, name="engine-watch"),
            self._reader,
        ):
            thread.start()

    def send(self, *message: Any) -> None:
        """Never blocks; a message to a child that is gone is dropped."""
        self._outbox.put(message)

    def end(self, within_s: float = 0.0) -> None:
        """Kill it unless it ends by itself ``within_s``."""
        try:
            self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def join(self) -> None:
        """Wait until ``ended`` has been called, if it ever will be."""
        if self._reader is not None:
            self._reader.join()

    def kill(self, why: str) -> None:
        """``why`` is then what it died of."""
        self._hung = why
        self.process.kill()

    def describe_death(self) -> str:
        """In one line. Waits for its end, if it is to tell the reason."""
        if self._hung:
            self.process.wait()
            return self._hung
        if self.trace:
            return f"an exception in its process: {self.trace.strip().splitlines()[-1]}"
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (this CPU cannot run the chosen dtype: use float32)" if name == "SIGILL" else ""
            hint = " (out of memory? lower kv_cache_bytes or max_length)" if name == "SIGKILL" else hint
            return f"its process was killed by {name}{hint}"
        return f"its process ended with exit code {code}; what it printed on stderr says why"

    def _receive(self, timeout_s: float, limit_s: float = math.inf) -> tuple[str, Any]:
        """The next message that is more than a sign of life."""
        look = min(LOOK_S, timeout_s / 10)
        silent, deadline = 0.0, time.monotonic() + limit_s
        while silent < timeout_s and time.monotonic() < deadline:
            if not self._connection.poll(look):
                silent += look  # by looks, as in `_watch`
                continue
            silent = 0.0
            kind, content = self._connection.recv()
            if kind != "alive":
                return kind, content
        late = f"its process was not ready within {limit_s:.0f} s, and was killed"
        self.kill(SILENT.format(timeout_s) if silent >= timeout_s else late)
        return self._connection.recv()

    def _write(self) -> None:
        """Own thread, so that a full pipe never blocks the event loop."""
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                return  # the reader finds out why
            if message[0] == "close":
                return

    def _read(self, results: TakesResults, ended: Callable[[Child], None]) -> None:
        try:
            while True:
                kind, content = self._connection.recv()
                self._heard += 1
                if kind == "results":
                    results(content)
                elif kind == "fatal":
                    self.trace = content
        except (EOFError, OSError):
            pass
        self.process.wait()
        self._gone.set()
        self._outbox.put(("close",))  # ends the writer
        self._writer.join()  # it would write to a number that the next child's connection may get
        self._connection.close()
        ended(self)

    def _watch(self, busy: Callable[[], bool], timeout_s: float) -> None:
        """Silence is counted by looks, not by the clock: whoever stops the trainer (Ctrl-Z) stops these, too."""
        look = min(LOOK_S, timeout_s / 10)
        silent, heard = 0.0, self._heard
        while not self._gone.wait(look):
            silent, heard = (silent + look if heard == self._heard and busy() else 0.0), self._heard
            if silent >= timeout_s:
                return self.kill(SILENT.format(timeout_s))
