"""Reports the progress of a stage, as marked lines in its output.

The process that started the stage removes these lines and shows them (``experiments.launch.screen``): only that
process knows the terminal, the log and the other stages.
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
    done: float  # share of the phase, in [0, 1], or NaN if unknown
    seconds: float  # since the phase began, in this process
    eta_s: float  # of the phase at the current speed, or NaN if unknown
    figures: tuple[str, ...] = ()  # "reward 0.312", the most important first

    @classmethod
    def parse(cls, line: bytes) -> Progress:
        fields = json.loads(line.removeprefix(MARK))
        return cls(**{**fields, "figures": tuple(fields["figures"])})


class ProgressReports:
    """Writes a stage's progress to stderr, at most every ``EVERY_S`` seconds and at the start and end of each phase."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float]] = {}  # phase -> time of its start, share done at that time
        self._last = -math.inf

    def begin(self, phase: str, done: float = 0.0) -> None:
        """Report the start of a phase, such as training. A validation may begin within training, which continues
        afterwards."""
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
        os.write(2, MARK + json.dumps(asdict(progress)).encode() + b"\n")  # one call: others write there, too
