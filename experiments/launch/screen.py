"""What a stage's output looks like: its words as they come, and its progress as a bar in a terminal's last line, or as
a line now and then in a file. The log always has the lines."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from pathlib import Path

from common.progress import MARK, Progress
from experiments.stages.context import Chain

REPORT = re.compile(re.escape(MARK) + rb"[^\n]*\n")
REDRAW_S = 0.5  # of a terminal
LINE_S, LINE_SHARE, FEWEST_S = 30.0, 0.1, 10.0  # a line when either is reached, but not more often than FEWEST_S
LONGEST_BAR, SHORTEST_BAR, NARROW = 24, 8, 72  # columns
LOG_WIDTH = 160


class Screen:
    """Output of one stage's process, with the reports of ``common.progress`` taken out and shown.

    Args:
        log: the stage's log, which is appended to.
        chain: where the stage is among those to be made.
    """

    def __init__(self, log: Path, chain: Chain | None = None) -> None:
        self._log, self._chain = log.open("ab"), chain or Chain()
        self._terminal = sys.stdout.isatty()
        self._progress: Progress | None = None
        self._line: tuple[str, float, float] = ("", time.monotonic(), 0.0)  # of which phase, when, and how much then
        self._begun = time.monotonic()
        self._rest = b""  # the beginning of a report
        self._fresh = True  # the cursor is where a line begins
        self._drawn = -math.inf  # when the bar was drawn; -inf: none is there

    def write(self, data: bytes) -> None:
        """Pass on what the process has said. Reports come in whole lines, but perhaps in the middle of another's."""
        data = self._rest + data
        cut = len(data) if (mark := data.rfind(MARK)) < 0 or b"\n" in data[mark:] else mark
        data, self._rest = data[:cut], data[cut:]
        start = 0
        for found in REPORT.finditer(data):
            self._say(data[start : found.start()])
            self._take(Progress.parse(found[0]))
            start = found.end()
        self._say(data[start:])

    def tick(self) -> None:
        """Draw the bar anew, if there is a terminal and the last drawing is old."""
        if self._terminal and self._fresh and time.monotonic() - self._drawn >= REDRAW_S:
            width = _width() - 1  # some terminals wrap when the last column is filled
            text = bar(self._progress, self._chain, time.monotonic() - self._begun, width)
            _out(b"\r\x1b[K" + text.encode())
            self._drawn = time.monotonic()

    def erase(self) -> None:
        """Take the bar away."""
        if self._drawn > -math.inf:
            _out(b"\r\x1b[K")
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
            _out(data)
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
            elapsed = now - self._begun
            width = _width() - 1 if self._terminal else LOG_WIDTH
            self._say(f"{line(progress, self._chain, elapsed, width)}\n".encode(), aloud=ended or not self._terminal)


def bar(progress: Progress | None, chain: Chain, elapsed: float, width: int) -> str:
    """One line of at most ``width`` columns; figures that find no room are left out, the last first.

    Args:
        progress: None before the first report, or of a stage that makes none.
        elapsed: seconds since the stage began.
    """
    place = _place(chain, narrow=width < NARROW)
    if progress is None:
        last = f" (last time {clock(chain.own_s)})" if chain.own_s is not None else ""
        return f"{place}running for {clock(elapsed)}{last}{_chain_eta(None, chain, elapsed)}"[:width]
    head, tail = f"{place}{progress.phase} ", _facts(progress, chain, elapsed)
    if len(head) + len(tail) > width:
        tail = _facts(progress, Chain(), elapsed)
    room = width - len(head) - len(tail) - SHORTEST_BAR
    shown = _fitting(progress.figures, room)
    length = min(LONGEST_BAR, SHORTEST_BAR + room - len(shown))
    full = round(length * progress.done) if math.isfinite(progress.done) else 0
    return f"{head}{'█' * full}{'░' * (length - full)}{tail}{shown}"[:width]


def line(progress: Progress, chain: Chain, elapsed: float, width: int) -> str:
    """The same without a bar, and with the time taken once the phase is done."""
    facts = _facts(progress, chain, elapsed)
    if progress.done == 1:
        facts = f" 100% in {clock(progress.seconds)}"
    text = f"  {_place(chain)}{progress.phase}{facts}"
    return text + _fitting(progress.figures, width - len(text))


def _place(chain: Chain, *, narrow: bool = False) -> str:
    if chain.total == 1:
        return ""
    return f"{chain.number}/{chain.total} " if narrow else f"stage {chain.number} of {chain.total} "


def _facts(progress: Progress, chain: Chain, elapsed: float) -> str:
    share = f" {progress.done:4.0%}" if math.isfinite(progress.done) else ""
    return f"{share} eta {clock(progress.eta_s)}{_chain_eta(progress, chain, elapsed)}"


def _chain_eta(progress: Progress | None, chain: Chain, elapsed: float) -> str:
    """What is left of this stage by its own pace or, if that is longer, by its last time, and of the others by theirs;
    ">": at least so much, since some of it is not known. Nothing where no other stage is known."""
    if not chain.rest_s:
        return ""
    own = [] if progress is None or not math.isfinite(progress.eta_s) else [progress.eta_s]
    if chain.own_s is not None:
        own.append(chain.own_s - elapsed)
    known = chain.own_s is not None and chain.rest_known
    return f" chain {'' if known else '>'}{clock(max([0.0, *own]) + chain.rest_s)}"


def _fitting(figures: tuple[str, ...], room: int) -> str:
    """Those of the figures, in their order, for which there is room, each after a space."""
    shown = ""
    for figure in figures:
        if len(shown) + 1 + len(figure) > room:
            break
        shown += f" {figure}"
    return shown


def clock(seconds: float) -> str:
    """``"0:05"``, ``"12:40"``, ``"2:05:10"``; ``"?"`` when not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _width() -> int:
    """Columns of the terminal as they are now (its window may have been resized)."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or 80


def _out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
