"""Runs one stage in a child process: its output on the terminal and in a log, and what Ctrl-C means.

The child leads a process group of its own, so that Ctrl-C reaches it only through us: the first asks it to stop
cleanly (SIGINT to the child alone, not to its engines and servers), the second ends the whole group at once.
If *we* are killed, the kernel ends the child (`stages.stage.die_with_parent`).
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from experiments.launch.fork_server import ForkedProcess, ForkServer
from experiments.launch.screen import Screen
from experiments.stages.context import Chain

WATCH_S = 1.0  # between two calls of the watch
GRACE_S = 10.0  # for the child to notice itself, and say better, what the watch has reported


@dataclass(frozen=True, slots=True)
class ChildResult:
    returncode: int
    interrupted: bool  # by Ctrl-C or SIGTERM
    trouble: str | None = None  # what the watch reported


def run_child(
    command: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    log: Path,
    watch: Callable[[], str | None] = lambda: None,
    fork_server: ForkServer | None = None,
    chain: Chain | None = None,
) -> ChildResult:
    """Run to the end. ``watch`` is asked every second; when it reports trouble (another node is gone), the
    child is killed ``GRACE_S`` later, unless it has ended by itself. ``fork_server``: start it there. ``chain``:
    for the screen."""
    screen = Screen(log, chain)
    child = (fork_server.start if fork_server else _start)(command, cwd=cwd, env=env)
    presses, trouble, looked, deadline = 0, None, 0.0, math.inf
    logging.getLogger().addHandler(notes := _Notes())

    def say(words: str) -> None:
        screen.erase()
        print(f"\n{words}", flush=True)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            say("stopping cleanly; Ctrl-C again ends it at once")
            child.send_signal(signal.SIGINT)
        else:
            say("ended at once")
            os.killpg(child.pid, signal.SIGKILL)

    def check_watch() -> None:
        nonlocal trouble, looked, deadline
        notes.pass_to(screen)
        if trouble is None and time.monotonic() > looked + WATCH_S:
            trouble, looked = watch(), time.monotonic()
            if trouble is not None:
                say(f"{trouble}; what runs here ends in {GRACE_S:.0f} s")
                deadline = looked + GRACE_S
        if time.monotonic() > deadline:
            os.killpg(child.pid, signal.SIGKILL)

    try:
        with handling(interrupt):
            _copy_output(child, screen, check_watch)
            while child.poll() is None:  # it has closed its output and lives on
                check_watch()
                time.sleep(0.05)
    finally:
        logging.getLogger().removeHandler(notes)
        notes.pass_to(screen)
        screen.close()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        returncode = child.wait()
    if trouble is None and returncode != 0 and not presses:
        trouble = watch()  # the child may have met another node's end before our next look, and said it worse
    return ChildResult(returncode, presses > 0, trouble)


def _start(command: Sequence[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


class _Notes(logging.Handler):
    """What this process says meanwhile, of a search server that ranks share for instance: for screen and log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[str] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.getMessage()}\n")

    def pass_to(self, screen: Screen) -> None:
        while self._lines:
            screen.write(self._lines.popleft().encode())


@contextmanager
def handling(interrupt: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP call ``interrupt`` for the time of the block."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, interrupt) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _copy_output(
    child: subprocess.Popen[bytes] | ForkedProcess, screen: Screen, check_watch: Callable[[], None]
) -> None:
    """Until the child is gone and has said everything (a grandchild may keep the other end open for longer)."""
    assert child.stdout is not None
    while True:
        check_watch()
        ready, _, _ = select.select([child.stdout], [], [], 0.2)
        data = os.read(child.stdout.fileno(), 65536) if ready else b""
        if not data and (ready or child.poll() is not None):
            return
        screen.write(data)
        screen.tick()
