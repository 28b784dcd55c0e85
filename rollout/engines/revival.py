"""Starts the child process of an engine, and another one when it dies or hangs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from common.restarts import Restarts, RestartsUsedUp
from rollout.engines.base import EngineGone
from rollout.engines.child import Child, Results
from rollout.trajectory import InfrastructureError

logger = logging.getLogger(__name__)

PAUSE_S = 5.0  # after a failed start: memory that the dead child held may take a while to be freed
START_FACTOR = 3.0  # a restart may take this many times as long as the first start, plus the heartbeat's timeout


class Owner(Protocol):
    """Interface of an engine whose child processes ``Children`` starts and restarts."""

    def receive(self, results: Results) -> None:
        """Take the results that the child process has sent. Called in the child's reader thread."""
        ...

    def busy(self) -> bool:
        """Return whether the child process has work, so that silence means that it hangs."""
        ...

    def child_died(self, child: Child) -> bool:
        """Stop sending messages to a child process that has died. Returns whether to start the next one. Called under
        the lock."""
        ...

    def before_restart(self, why: str) -> str:
        """Fail the messages that the next child process cannot continue. Returns a phrase that names the weights of
        that child."""
        ...

    def restore(self, child: Child) -> None:
        """Give a new child process the weights that the dead one held, and put it to sleep if that one slept."""
        ...

    def child_ready(self, child: Child, info: dict[str, Any]) -> None:
        """Send the waiting messages to a new child process. Called under the lock."""
        ...

    def fail(self, why: InfrastructureError) -> None:
        """Fail all unanswered messages, and every new message until the next `start`."""
        ...


class Children:
    """The child processes of one engine, one at a time. ``lock``: the engine's, which also guards this object."""

    def __init__(self, owner: Owner, lock: threading.RLock, restarts: int, timeout_s: float) -> None:
        self._owner, self._lock, self._timeout_s = owner, lock, timeout_s
        self.restarts = Restarts(restarts)
        self.latest: Child | None = None
        self.spawned = 0  # children so far
        self.closing = threading.Event()
        self._first: tuple[Any, ...] = ()  # message that tells a child what to build
        self._environment: Mapping[str, str] = {}
        self._start_s = 0.0  # seconds that the first start took
        self._reviving: threading.Thread | None = None

    def start(self, first: tuple[Any, ...], environment: Mapping[str, str]) -> tuple[Child, dict[str, Any]]:
        """Start the first child process of the engine. Returns it, and the facts that it reports about the model.

        Starts another one if the child hangs. A child that dies at its start would mostly die again.

        Args:
            first: message that tells each child what to build.
            environment: of each child, also of later ones: by then Lightning has set more variables.
        """
        self._first, self._environment = first, environment
        self.closing.clear()
        self.restarts = Restarts(self.restarts.limit)
        while True:
            began = time.monotonic()
            child = self._spawn()
            if child is None:
                raise InfrastructureError("the engine was closed")
            try:
                info = child.ready(self._timeout_s)
                self._start_s = time.monotonic() - began
                return child, info
            except InfrastructureError as error:
                child.end(5.0)
                if not child.hung or not self.restarts.take():
                    why = f"{child.trace or error}{self.restarts.used_up() if child.hung else ''}"
                    raise InfrastructureError(f"the engine's process failed at start: {why}") from None
                logger.warning("the engine hung while it started: %s. Another is started (%s)", error, self.restarts)
            except BaseException:
                child.end(5.0)
                raise
            self.closing.wait(PAUSE_S)

    def begin(self, child: Child, info: dict[str, Any]) -> None:
        """Let a child process that is ready take requests. Called under the lock."""
        self._owner.child_ready(child, info)
        child.begin(self._owner.receive, self._ended, self._owner.busy, self._timeout_s)

    def revive(self, why: str) -> None:
        """Start the engine's next child process in a new thread. Called under the lock."""
        self._reviving = threading.Thread(target=self._revive, args=(why,), daemon=True, name="engine-revival")
        self._reviving.start()

    def close(self, ask: Callable[[Child], float]) -> bool:
        """End the latest child process, and return whether there was one.

        Args:
            ask: called under the lock with the latest child; asks it to end, and returns how many seconds it may take.
        """
        with self._lock:
            self.closing.set()
            child, thread = self.latest, self._reviving
            patience_s = 0.0 if child is None else ask(child)
        if child is None:
            return False
        child.end(patience_s)
        child.join()
        if thread is not None:
            thread.join()
        return True

    def _spawn(self) -> Child | None:
        """Spawn and return a child process, or None while the engine is being closed."""
        with self._lock:  # so that `close` finds every child
            if self.closing.is_set():
                return None
            self.spawned += 1
            self.latest = Child(self._first, self._environment, os.getpid())
            return self.latest

    def _ended(self, child: Child) -> None:
        """Start the next child process after one has ended, if the engine asks for it. Runs in that child's reader
        thread."""
        with self._lock:
            if self._owner.child_died(child) and not self.closing.is_set():
                self.revive(child.describe_death())
        if child.trace and not self.closing.is_set():
            logger.warning("%s", child.trace)

    def _revive(self, why: str) -> None:
        """Start child processes until one has the weights of the dead one, or no restart is left."""
        errors = (ValueError, OSError, InfrastructureError)
        try:
            self.restarts.revive(self._next, why, self.closing, PAUSE_S, errors)
        except RestartsUsedUp as error:
            self._owner.fail(EngineGone(f"the engine died: {error}"))

    def _next(self, why: str) -> None:
        with self._lock:
            if self.closing.is_set():
                return
            weights = self._owner.before_restart(why)
            logger.warning("the engine died: %s. It is restarted (%s) with %s", why, self.restarts, weights)
            child = self._spawn()
        assert child is not None
        try:
            info = child.ready(self._timeout_s, self._timeout_s + START_FACTOR * self._start_s)
            self._owner.restore(child)
        except Exception:
            child.end()
            raise
        with self._lock:
            if not self.closing.is_set():
                logger.warning("the engine runs again")
                self.begin(child, info)
