"""One child process of an engine (`worker.py`), the pipe to it, and the watch over its heartbeats."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.errors import signal_name
from rollout.trajectory import InfrastructureError

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package `rollout`
POLL_S = 1.0  # longest pause between two checks of a process; as long as worker.py's BEAT_S
SILENT = "its process sent no heartbeat for {:g} s (option heartbeat_timeout_s), and was killed"

Results = list[tuple[int, Any]]  # (number of the message, its outcome)
TakesResults = Callable[[Results], None]


class Child:
    """A child process that runs the model of an engine. The constructor spawns it (never forks). Call `ready`, then
    `ask` any number of times, then `begin`."""

    def __init__(self, first: tuple[Any, ...], environment: Mapping[str, str], parent: int) -> None:
        """Spawn the child process. ``first``: message that tells it what to build. ``parent``: id of the process whose
        end ends the child."""
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout.engines.worker", str(theirs.fileno()), str(parent)],
            pass_fds=[theirs.fileno()],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=2,  # prints of libraries go to the log, not to the command's output
        )
        theirs.close()
        self._first, self._connection = first, Connection(ours.detach())
        self._outbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._heard = 0  # messages received so far
        self.trace: str | None = None  # of the exception that ended the child
        self._hung: str | None = None  # why this side killed it
        self._gone = threading.Event()
        self._reader: threading.Thread | None = None
        self._writer = threading.Thread(target=self._write, daemon=True, name="engine-writer")

    @property
    def hung(self) -> bool:
        """Whether the parent process killed the child. Before the child is ready the only reason is a missing
        heartbeat."""
        return self._hung is not None

    def ready(self, timeout_s: float, limit_s: float = math.inf) -> dict[str, Any]:
        """Wait until the child process has loaded the model. Returns the facts that it reports about the model.

        Args:
            timeout_s: the child is killed after so many seconds without a heartbeat.
            limit_s: the child is killed after so many seconds in all.

        Raises:
            ValueError: the options do not fit the model.
            InfrastructureError: the child ended, or was not ready in time.
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
        """Send one message to the child process and return its outcome, before `begin`. Raises InfrastructureError as
        `ready`."""
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
        """Start the threads that write messages to the child process, read its results, and watch its heartbeats.

        Args:
            results: called with the results.
            ended: called in the reading thread when the child has ended.
            busy: says whether the child has work, and so must send heartbeats.
            timeout_s: a busy child is killed after so many seconds without a heartbeat.
        """
        self._reader = threading.Thread(target=self._read, args=(results, ended), daemon=True, name="engine-reader")
        for thread in (
            self._writer,
            threading.Thread(target=self._watch, args=(busy, timeout_s), daemon=True, name="engine-watch"),
            self._reader,
        ):
            thread.start()

    def send(self, *message: Any) -> None:
        """Send a message to the child process without blocking. A message to a dead child is dropped."""
        self._outbox.put(message)

    def end(self, within_s: float = 0.0) -> None:
        """Wait up to ``within_s`` seconds until the child process ends, then kill it."""
        try:
            self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def join(self) -> None:
        """Wait until the reading thread has called ``ended`` (a callback of `begin`), if `begin` started one."""
        if self._reader is not None:
            self._reader.join()

    def kill(self, why: str) -> None:
        """Kill the child process. `describe_death` then returns ``why``."""
        self._hung = why
        self.process.kill()

    def describe_death(self) -> str:
        """Return why the child process died, in one line. Waits for its end if needed."""
        if self._hung:
            self.process.wait()
            return self._hung
        if self.trace:
            return f"an exception in its process: {self.trace.strip().splitlines()[-1]}"
        code = self.process.wait()
        if code < 0:
            name = signal_name(-code)
            hint = " (this CPU cannot run the chosen dtype: use float32)" if name == "SIGILL" else ""
            hint = " (out of memory? lower kv_cache_bytes or max_length)" if name == "SIGKILL" else hint
            return f"its process was killed by {name}{hint}"
        return f"its process ended with exit code {code}; see its output on stderr"

    def _receive(self, timeout_s: float, limit_s: float = math.inf) -> tuple[str, Any]:
        """Return (kind, content) of the child's next message that is not a heartbeat. Kills a child that is late."""
        poll_s = min(POLL_S, timeout_s / 10)
        silent, deadline = 0.0, time.monotonic() + limit_s
        while silent < timeout_s and time.monotonic() < deadline:
            if not self._connection.poll(poll_s):
                silent += poll_s  # counted in polls, as in `_watch`
                continue
            silent = 0.0
            kind, content = self._connection.recv()
            if kind != "alive":
                return kind, content
        late = f"its process was not ready within {limit_s:.0f} s, and was killed"
        self.kill(SILENT.format(timeout_s) if silent >= timeout_s else late)
        return self._connection.recv()

    def _write(self) -> None:
        """Write queued messages to the child process, in a separate thread, so that a full pipe never blocks the event
        loop."""
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:
                return  # the reading thread finds the reason
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
        self._writer.join()  # before its descriptor may be reused for the next child's connection
        self._connection.close()
        ended(self)

    def _watch(self, busy: Callable[[], bool], timeout_s: float) -> None:
        """Kill the child process if it has work and sends no heartbeat. Silence is counted in polls, because Ctrl-Z
        also stops the polls."""
        poll_s = min(POLL_S, timeout_s / 10)
        silent, heard = 0.0, self._heard
        while not self._gone.wait(poll_s):
            silent, heard = (silent + poll_s if heard == self._heard and busy() else 0.0), self._heard
            if silent >= timeout_s:
                return self.kill(SILENT.format(timeout_s))
