"""Base class of the stages that turn published traces into trajectories for supervised training."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from common.progress_reports import ProgressReports
from common.ranges import PositiveInt
from data_modules.datasets.files import DatasetError, spread
from data_modules.datasets.traces import MalformedTrace
from data_modules.evaluation_data import as_list
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

CHUNK = 1000  # traces per file

Trace = TypeVar("Trace")


class TraceStage(ABC, Generic[Trace]):
    """Stage that reads traces (recorded conversations), tokenises each into a trajectory, and writes and counts the
    trajectories.

    Args:
        files: of traces.
        max_tokens: of a trajectory, prompt included.
        limit: at most so many traces, evenly spaced over the files.
    """

    label: ClassVar[str]
    expected: ClassVar[str]  # what a trace should hold, for the message that none could be kept
    counted: ClassVar[tuple[str, ...]] = ()  # what ``note`` and ``shorten`` count

    def __init__(self, files: Sequence[str], max_tokens: PositiveInt | None, limit: PositiveInt | None) -> None:
        self.files = as_list("files", files)
        self.max_tokens, self.limit = max_tokens, limit

    @staticmethod
    @abstractmethod
    def read_file(path: Path) -> list[Trace]:
        """Return all traces (recorded conversations) of a file. Raises DatasetError."""

    def read(self) -> list[Trace]:
        return [trace for file in self.files for trace in self.read_file(Path(file))]

    @abstractmethod
    def trajectory(self, trace: Trace) -> Trajectory:
        """Return one trace, tokenised, as a trajectory. Raises MalformedTrace."""

    @abstractmethod
    def note(self, trace: Trace, trajectory: Trajectory, counts: Counter[str]) -> None:
        """Add further properties of a kept trace to ``counts``, for the stage's table."""

    def shorten(self, trajectory: Trajectory, max_tokens: int) -> Trajectory | None:
        """Shorten a trajectory that is too long, or return None to drop it."""
        return None

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the trajectories of all traces, and return a table of counts. Its names are ``found``, ``kept``,
        ``too_long`` (left out), ``malformed`` and ``malformed/<reason>``, ``tokens`` and ``loss_tokens`` (of the kept),
        the stage's own ``counted`` and ``seconds``.

        Raises:
            DatasetError: no such file, a row of an unknown shape, or no trace that can be kept.
        """
        start = time.monotonic()
        traces = spread(self.read(), self.limit)
        counts: Counter[str] = Counter()
        reports = ProgressReports()
        reports.begin("read")
        for number, first in enumerate(range(0, len(traces), CHUNK)):
            chunk = traces[first : first + CHUNK]
            made = [self._count(trace, counts) for trace in chunk]
            kept = [trajectory for trajectory in made if trajectory is not None]
            if kept:
                save_trajectories(Path(output_dir) / "trajectories" / f"chunk-{number:05d}.parquet", kept)
            reports.report("read", (first + len(chunk)) / len(traces), [f"kept {counts['kept']:,}"])
        malformed = {name: count for name, count in sorted(counts.items()) if name.startswith("malformed/")}
        summary: dict[str, Any] = {"found": len(traces), "malformed": sum(malformed.values()), **malformed}
        summary |= {name: counts[name] for name in ("kept", "too_long", "tokens", "loss_tokens", *self.counted)}
        summary["seconds"] = time.monotonic() - start
        logger.info("%s: %s", self.label, summary)
        if not summary["kept"]:
            raise DatasetError(
                f"{', '.join(self.files)}: none of {len(traces)} traces can be trained on ("
                + ", ".join(f"{name} {count}" for name, count in summary.items() if count and name != "seconds")
                + f"); expected {self.expected}, and at most {self.max_tokens} tokens"
            )
        return summary

    def _count(self, trace: Trace, counts: Counter[str]) -> Trajectory | None:
        try:
            trajectory = self.trajectory(trace)
        except MalformedTrace as fault:
            counts[f"malformed/{fault.reason}"] += 1
            return None
        if self.max_tokens is not None and _length(trajectory) > self.max_tokens:
            shorter = self.shorten(trajectory, self.max_tokens)
            if shorter is None:
                counts["too_long"] += 1
                return None
            counts["cut"] += 1
            trajectory = shorter
        counts["kept"] += 1
        counts["tokens"] += _length(trajectory)
        counts["loss_tokens"] += sum(trajectory.loss_mask)
        self.note(trace, trajectory, counts)
        return trajectory


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_ids) + len(trajectory.response_ids)
