"""Pool of processes that call one function, and kill each call at its deadline.

Reward code may hang (a computer algebra system given 10^(10^10)), and it runs in threads, which no signal can
interrupt. So the call runs in a spawned process, which pebble kills when its time is up.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import signal
import threading
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from common.env_vars import RANK_VARIABLES
from rollout.trajectory import InfrastructureError

ABORT_S = 5.0  # in which a pool that breaks answers the calls that it had
GRACE_S = 1.0  # after the deadline, a process whose parent is gone ends itself


class DeadlineExceeded(Exception):
    """A call did not finish in time; its process has been killed."""


class WorkerDied(Exception):
    """A call ended its process (stack overflow, abort, out of memory)."""


class DeadlinePool:
    """Calls one function in up to ``workers`` processes at once; safe to use from any number of threads.

    The processes start with the first call and import the function's module. Each serves call after call, and is
    replaced if it dies. All end with ``close`` or with the interpreter.

    Args:
        function: dotted path, ``package.module.function``. Arguments and result must be picklable.
        workers: processes at once. Further calls wait, and their deadline starts after that.
        memory_mb: address space of each process (MiB) beyond its imports; the function then meets a MemoryError.
    """

    def __init__(self, function: str, *, workers: int = 2, memory_mb: int = 1024) -> None:
        self.function, self.workers, self.memory_mb = function, workers, memory_mb
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def call(self, *arguments: Any, timeout_s: float) -> Any:
        """Call the pool's function in a process. Returns its result, or raises its exception.

        Args:
            timeout_s: wall-clock seconds for the function itself.

        Raises:
            DeadlineExceeded, WorkerDied: see there.
            InfrastructureError: the processes cannot be started.
        """
        try:
            return self._answer(arguments, timeout_s)
        except BrokenProcessPool:  # an idle process was killed, which ends the others too: try once more
            try:
                return self._answer(arguments, timeout_s)
            except BrokenProcessPool as error:
                raise InfrastructureError(f"the processes for {self.function} failed at start: {error}") from error

    def _answer(self, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        with self._lock:
            if self._pool is not None and not self._pool.active:  # broken: none of its calls is left
                self._pool.stop()
                self._pool.join()
                self._pool = None
            if self._pool is None:
                self._pool = ProcessPool(
                    self.workers,
                    initializer=_prepare,
                    initargs=(self.function, self.memory_mb),
                    context=multiprocessing.get_context("spawn"),
                )
            try:
                future = self._pool.schedule(_call, args=(self.function, timeout_s, arguments), timeout=timeout_s)
            except RuntimeError as error:  # it broke since
                raise BrokenProcessPool(str(error)) from error
            pool = self._pool
        while not wait([future], 1.0).done:  # a pool that breaks while it is given a call may never answer it
            if not pool.active and not wait([future], ABORT_S).done:
                raise BrokenProcessPool("the worker processes ended before one took the call")
        try:
            returned, result = future.result()
        except TimeoutError:
            raise DeadlineExceeded(f"{self.function} was not finished in {timeout_s:g} s") from None
        except ProcessExpired as error:
            raise WorkerDied(f"the process for {self.function} ended with exit code {error.exitcode}") from None
        if not returned:
            raise result
        return result

    def close(self) -> None:
        """End all processes of the pool after the calls in flight. Idempotent; a later call starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            pool.join()


def _prepare(function: str, memory_mb: int) -> None:
    """Prepare a pool's process for its first call: it ignores Ctrl-C and forgets the trainer's rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    _find(function)
    # A spawned process imports the trainer's main module, too, which may take gigabytes of address space.
    imported = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for which, value in ((resource.RLIMIT_AS, imported + (memory_mb << 20)), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def _find(function: str) -> Any:
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _call(function: str, timeout_s: float, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Call a function with a deadline. Returns True and the result, or False and the function's TimeoutError, which
    pebble raises for kills too."""
    # SIGALRM's default action ends the process even in the middle of one long operation.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
    try:
        return True, _find(function)(*arguments)
    except TimeoutError as error:
        return False, error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
