"""Running one stage in a child process: its output on the terminal and in a log, and what Ctrl-C means.

The child leads a process group of its own, so that Ctrl-C reaches it only through us: the first asks it to stop
cleanly (SIGINT to the child alone, not to its engines and servers), the second ends the whole group at once.
If *we* are killed, the kernel ends the child (`die_with_parent`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>78]")
PR_SET_PDEATHSIG = 1
GRACE_S = 10.0  # for the child to notice itself, and say better, what the watch has reported
END_S = 45.0  # after which it is killed


@dataclass(frozen=True, slots=True)
class ChildResult:
    returncode: int
    interrupted: bool  # by Ctrl-C or SIGTERM
    trouble: str | None = None  # what the watch reported


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process that started us dies; at once if it already has (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_child(
    command: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    log: Path,
    on_interrupt: Callable[[int], None],
    watch: Callable[[], str | None] = lambda: None,
) -> ChildResult:
    """Run to the end. ``on_interrupt(n)`` is called at the n-th Ctrl-C, to tell the user what happens next.

    ``watch`` is asked several times a second. When it reports trouble (another node is gone), the child is asked to
    stop ``GRACE_S`` later and killed ``END_S`` later, unless it has ended by itself.
    """
    terminal = sys.stdout.isatty()
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        _copy_window_size(theirs)
    child = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    presses = 0

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        on_interrupt(presses)
        if presses == 1:
            child.send_signal(signal.SIGINT)
        else:
            os.killpg(child.pid, signal.SIGKILL)

    guard = _Guard(child, watch)
    try:
        with _handlers(interrupt), log.open("ab") as stream:
            _copy_output(ours, child, _LogWriter(stream), guard.look)
            while child.poll() is None:  # it has closed its output and lives on
                guard.look()
                time.sleep(0.05)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(ours)
    return ChildResult(child.returncode, presses > 0, guard.trouble)


class _Guard:
    """Ends the child some time after the watch has reported trouble."""

    def __init__(self, child: subprocess.Popen[bytes], watch: Callable[[], str | None]) -> None:
        self._child, self._watch = child, watch
        self.trouble: str | None = None
        self._since = 0.0
        self._asked = False

    def look(self) -> None:
        if self.trouble is None:
            self.trouble, self._since = self._watch(), time.monotonic()
            if self.trouble is not None:
                print(f"\n{self.trouble}; what runs here ends in {GRACE_S:.0f} s", flush=True)
            return
        waited = time.monotonic() - self._since
        if waited > END_S:
            os.killpg(self._child.pid, signal.SIGKILL)
        elif waited > GRACE_S and not self._asked:
            self._asked = True
            self._child.send_signal(signal.SIGINT)


@contextmanager
def _handlers(interrupt: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, interrupt) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _copy_output(
    source: int, child: subprocess.Popen[bytes], log: _LogWriter, look: Callable[[], None]
) -> None:
    """Until the child is gone and has said everything (a grandchild may keep the other end open for longer)."""
    while True:
        look()
        ready, _, _ = select.select([source], [], [], 0.2)
        if not ready:
            if child.poll() is not None:
                break
            continue
        try:
            data = os.read(source, 65536)
        except OSError:  # a pty whose other end is closed reads as EIO
            break
        if not data:
            break
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        log.write(data)
    log.close()


class _LogWriter:
    """Plain lines for the log: no colours, and of a progress bar that redraws itself only what it ended with."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if b"\r" in self._rest[:-1]:
            self._rest = self._rest[self._rest.rindex(b"\r", 0, -1) :]

    def _line(self, line: bytes) -> None:
        parts = [p for p in ESCAPES.sub(b"", line).split(b"\r") if p.strip()]
        self._stream.write((parts[-1] if parts else b"") + b"\n")
        self._stream.flush()

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)


def _copy_window_size(target: int) -> None:
    size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)
