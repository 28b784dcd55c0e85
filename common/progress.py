"""How far the work of a stage is, told in marked lines among its output.

The process that has started the stage takes them out and shows them (``experiments.launch.screen``): it alone knows the
terminal, the log and the other stages.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MARK = b"\x1e"  # ASCII's record separator; the line ends with a newline
EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    phase: str  # "train", "validate", "test", "generate", ...
    done: float  # share of the phase, in [0, 1]; NaN: nobody knows
    seconds: float  # since the phase began, in this process
    eta_s: float  # of the phase, if it goes on as fast as so far; NaN: not known yet
    figures: tuple[str, ...] = ()  # "reward 0.312", the most telling first

    @classmethod
    def parse(cls, line: bytes) -> Progress:
        fields = json.loads(line.removeprefix(MARK))
        return cls(**{**fields, "figures": tuple(fields["figures"])})


class ProgressReports:
    """Writes to stderr at most every ``EVERY_S`` seconds, and always when a phase begins or is done."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float]] = {}  # phase -> when, and the share that was done then
        self._last = -math.inf

    def begin(self, phase: str, done: float = 0.0) -> None:
        """A validation may begin within a training, which goes on afterwards."""
        self._begun[phase] = (time.monotonic(), done)
        self._write(Progress(phase, done, 0.0, math.nan))

    def report(self, phase: str, done: float, figures: Sequence[str] = ()) -> None:
        now = time.monotonic()
        if now - self._last < EVERY_S and done < 1:
            return
        begun, before = self._begun[phase]
        gained = done - before
        eta = (now - begun) * (1 - done) / gained if gained > 0 else math.nan
        self._write(Progress(phase, done, now - begun, eta, tuple(figures)))

    def _write(self, progress: Progress) -> None:
        self._last = time.monotonic()
        os.write(2, MARK + json.dumps(asdict(progress)).encode() + b"\n")  # in one piece: others write there, too
