"""Shared by both sides of benchmarks.tool_calls: the case, the calls and their durations. Without torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.against_trl.cases import Case

MODEL = "small"  # folder of the case
CALLS = 2  # calls of every trajectory, one per turn, before its last turn
RESULT = 'Doc 1(Title: "Somewhere") ' + "the old town lies near the river and a bridge " * 3
LATENCIES = {  # seconds: median, and sigma of the logarithm
    "0ms": (0.0, 0.0),
    "50ms": (0.05, 0.0),
    "200ms": (0.2, 0.0),
    "log-normal": (0.05, 1.0),
}


@dataclass(frozen=True)
class ToolCase(Case):
    latency: str = "0ms"

    def waits(self) -> Iterator[float]:
        """Return the seconds of each call, the same for both sides."""
        draw, (median, sigma) = random.Random(0), LATENCIES[self.latency]
        while True:
            yield median * draw.lognormvariate(0, sigma)
