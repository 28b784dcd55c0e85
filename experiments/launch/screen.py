"""Shows a stage's output and progress. A terminal has the progress in its last line; a file has a line now and then."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import time
from pathlib import Path

from callbacks.tracking.run_info import duration
from common.progress_reports import MARK, Progress
from experiments.stages.context import Chain

REPORT = re.compile(re.escape(MARK) + rb"[^\n]*\n")
REDRAW_S = 0.5  # between two drawings on a terminal
LINE_S, LINE_SHARE, FEWEST_S = 30.0, 0.1, 10.0  # a line after LINE_S or this share, FEWEST_S apart
LOG_WIDTH = 160  # columns


class Screen:
    """Shows the output of one stage's process and its progress, on the terminal and in the log.

    Args:
        log: the stage's log, which is appended to.
        chain: position of the stage among those to be made.
    """

    def __init__(self, log: Path, chain: Chain | None = None) -> None:
        self._log, self._chain = log.open("ab"), chain or Chain()
        self._terminal = sys.stdout.isatty()
        self._progress: Progress | None = None
        self._line: tuple[str, float, float] = ("", time.monotonic(), 0.0)  # phase, time and share of the last line
        self._begun = time.monotonic()
        self._rest = b""  # the beginning of a report
        self._fresh = True  # whether the cursor is where a line begins
        self._drawn = -math.inf  # time of the drawing on the terminal, -inf without one

    def write(self, data: bytes) -> None:
        """Show a piece of the process's output, and take the progress reports out of it. A report is one line, but may
        follow the beginning of another line."""
        data = self._rest + data
        cut = len(data) if (mark := data.rfind(MARK)) < 0 or b"\n" in data[mark:] else mark
        data, self._rest = data[:cut], data[cut:]
        start = 0
        for found in REPORT.finditer(data):
            self._say(data[start : found.start()])
            try:
                self._take(Progress.parse(found[0]))
            except (ValueError, TypeError, KeyError):  # the program's own output
                self._say(found[0])
            start = found.end()
        self._say(data[start:])

    def tick(self) -> None:
        """Redraw the progress line on a terminal, if the last drawing is old."""
        if self._terminal and self._fresh and time.monotonic() - self._drawn >= REDRAW_S:
            try:
                columns = os.get_terminal_size(sys.stdout.fileno()).columns or 80  # as they are now
            except OSError:  # it was closed
                self._terminal = False
                return
            text = status(self._progress, self._chain, time.monotonic() - self._begun, columns - 1)
            out(b"\r\x1b[K" + text.encode())
            self._drawn = time.monotonic()

    def erase(self) -> None:
        """Clear the progress line from the terminal."""
        if self._drawn > -math.inf:
            out(b"\r\x1b[K")
            self._drawn = -math.inf

    def close(self) -> None:
        self.erase()
        self._say(self._rest)
        self._log.close()

    def _say(self, data: bytes, *, aloud: bool = True) -> None:
        if not data:
            return
        if aloud:
            self.erase()
            out(data)
            self._fresh = data.endswith(b"\n")
        self._log.write(data)
        self._log.flush()

    def _take(self, progress: Progress) -> None:
        self._progress = progress
        phase, at, done = self._line
        now, ended = time.monotonic(), progress.done == 1 and progress.phase != "validate"
        gained = progress.done - (done if phase == progress.phase else 0.0)
        if ended or (now - at >= FEWEST_S and (gained >= LINE_SHARE or now - at >= LINE_S)):
            self._line = (progress.phase, now, progress.done)
            text = status(progress, self._chain, now - self._begun)
            self._say(f"  {text}\n".encode(), aloud=ended or not self._terminal)


def status(progress: Progress | None, chain: Chain, elapsed: float, width: int = LOG_WIDTH) -> str:
    """Return a stage's progress in one line of at most ``width`` columns, such as ``stage 4 of 13: train 50%, 1 min 00
    s left, reward 0.312``.

    Args:
        progress: the last report, if there was one.
        elapsed: seconds since the stage began.
    """
    place = f"stage {chain.number} of {chain.total}: " if chain.total > 1 else ""
    if progress is None:
        last = f" (last time {duration(chain.own_s)})" if chain.own_s is not None else ""
        parts = [f"{place}running for {duration(elapsed)}{last}"]
    elif progress.done == 1:
        parts = [f"{place}{progress.phase} 100% in {duration(progress.seconds)}"]
    else:
        share = f" {progress.done:.0%}" if math.isfinite(progress.done) else ""
        parts = [f"{place}{progress.phase}{share}", f"{duration(progress.eta_s)} left"]
    if chain.rest_s:
        parts.append(_chain_left(progress, chain, elapsed))
    parts += progress.figures if progress else ()
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)[:width]


def _chain_left(progress: Progress | None, chain: Chain, elapsed: float) -> str:
    """Return the estimated time until all stages end, as text, such as "2 h 05 min for all". It is based on the pace of
    this stage and on earlier runs. ">" marks a lower bound, because a stage has no earlier run."""
    own = [progress.eta_s] if progress is not None and math.isfinite(progress.eta_s) else []
    own += [chain.own_s - elapsed] if chain.own_s is not None else []
    known = chain.own_s is not None and chain.rest_known
    return f"{'' if known else '>'}{duration(max([0.0, *own]) + chain.rest_s)} for all"


def out(data: bytes) -> None:
    """Write to the standard output, even if nobody reads it any more."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        _go_on_unread()


def _go_on_unread() -> None:
    """Send what is printed to /dev/null from now on, because its reader is gone (``tee`` ended with the same Ctrl-C,
    the terminal was closed). The stage can then end as it should, and its log has everything."""
    nowhere, gone = os.open(os.devnull, os.O_WRONLY), os.fstat(sys.stdout.fileno())
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        if os.path.samestat(os.fstat(descriptor), gone):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
