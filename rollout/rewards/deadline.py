"""A function in child processes, each call under a deadline that really ends it.

Reward code may hang (a computer algebra system given 10^(10^10)), and rewards are scored in threads, where no signal
can interrupt it. So the call runs in another process, spawned and never forked, which is killed when its time is up.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout.engines.environment import child_environment
from rollout.trajectory import InfrastructureError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package `rollout`
WORKER = "rollout.rewards.deadline_worker"
START_SECONDS = 120.0  # to start Python and import the function's module, on a loaded machine


class DeadlineExceeded(Exception):
    """A call was not finished in its time; its process has been killed."""


class WorkerDied(Exception):
    """A call took its process down with it (stack overflow, abort, out of memory)."""


class DeadlinePool:
    """Calls one function in up to ``workers`` processes at once; safe to use from any number of threads.

    A process starts at the first call that finds none idle, imports the function's module and serves call after call;
    one that was killed or died is replaced when it is next needed. All end with ``close``, with this object or with
    the interpreter; a process whose parent was killed ends at the latest one second after the deadline of its call.

    Args:
        function: dotted path, ``package.module.function``. Arguments and result must be picklable.
        workers: processes at once; further calls wait, which does not count towards their deadline.
        memory_mb: address space of each (MiB); beyond it the function meets a MemoryError.

    Raises:
        ValueError: workers or memory_mb out of range.
    """

    def __init__(self, function: str, *, workers: int = 2, memory_mb: int = 1024) -> None:
        if workers < 1 or memory_mb < 128:
            raise ValueError(f"workers is {workers}, memory_mb {memory_mb}; expected at least 1 and at least 128")
        self.function, self.memory_mb = function, memory_mb
        self._free = threading.Semaphore(workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()  # idle ones and busy ones
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop_all, self._alive)

    def call(self, *arguments: Any, timeout_s: float) -> Any:
        """The function's result.

        Args:
            timeout_s: wall-clock seconds that the function itself may take.

        Raises:
            DeadlineExceeded, WorkerDied: see there.
            RuntimeError: the function raised (the message holds its traceback), or this pool is closed.
            InfrastructureError: no process could be started.
            ValueError: timeout_s is not positive.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; expected more than 0 seconds")
        with self._free:
            worker = self._take()
            try:
                kind, value = worker.ask(arguments, timeout_s)
            except BaseException:  # also KeyboardInterrupt: the answer to this call must not reach the next one
                self._discard(worker)
                raise
            with self._lock:
                self._idle.append(worker)
        if kind == "error":
            raise RuntimeError(f"{self.function} failed: {value}")
        return value

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that are up."""
        with self._lock:
            return tuple(sorted(worker.process.pid for worker in self._alive))

    def close(self) -> None:
        """Kill all processes; calls under way fail with WorkerDied, later ones with RuntimeError. Idempotent."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            _stop_all(self._alive)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the processes for {self.function} have been closed")
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._alive.discard(worker)
                worker.stop()
            worker = _Worker(self.function, self.memory_mb)
            self._alive.add(worker)
        try:
            worker.wait_until_ready()
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.stop()


class _Worker:
    """The parent's side of `deadline_worker.py`: one process, one call at a time."""

    def __init__(self, function: str, memory_mb: int) -> None:
        ours, theirs = socket.socketpair()
        environment = child_environment(os.environ, threads=1)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        self.function = function
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs.fileno()), function, str(memory_mb)],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def wait_until_ready(self) -> None:
        try:
            if not self._connection.poll(START_SECONDS):
                raise InfrastructureError(f"the process for {self.function} did not start in {START_SECONDS:.0f} s")
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            kind, value = "error", f"it ended with exit code {self.process.wait()}; its stderr says why"
        if kind != "ready":
            raise InfrastructureError(f"the process for {self.function} failed at start: {value}")

    def ask(self, arguments: tuple[Any, ...], timeout_s: float) -> tuple[str, Any]:
        try:
            self._connection.send((arguments, timeout_s))
            if not self._connection.poll(timeout_s):
                raise DeadlineExceeded(f"{self.function} was not finished in {timeout_s:g} s")
            return self._connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            if code == -signal.SIGALRM:  # its own alarm: this process was itself held up beyond the deadline
                raise DeadlineExceeded(f"{self.function} was not finished in {timeout_s:g} s") from None
            raise WorkerDied(f"the process for {self.function} ended with exit code {code} during a call") from None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


def _stop_all(workers: set[_Worker]) -> None:
    for worker in workers:
        # Not stop(): a thread that still waits for the answer must find an open connection that has ended.
        worker.process.kill()
        worker.process.wait()
    workers.clear()
