"""``metrics.jsonl`` of a run: every logged value, a line per call, on the disk before MLflow has it. Without torch and
MLflow.

A line is ``{"step": 3, "ms": 1764126000000, "metrics": {"train/loss": 0.5}}``; a value that is not finite is text, as
"nan".
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of one call."""

    step: int
    ms: int  # since the epoch
    metrics: Mapping[str, float]


class MetricsFile:
    """Appends to the file of this process's run, and reads it while it grows.

    A value that was the last of its name at the same step is not written again. A line that a kill has torn is cut off.

    Args:
        path: None: a temporary file, deleted when the process ends.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", buffering=0) if path is not None else tempfile.TemporaryFile(buffering=0)
        self._last: dict[str, tuple[int, Any]] = {}
        self.rewind(self.size)

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of a call; text values are left out."""
        values = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, str)}
        values = {name: value for name, value in values.items() if self._last.get(name) != (step, value)}
        if values:
            self._last |= {name: (step, value) for name, value in values.items()}
            line = {"step": step, "ms": time.time_ns() // 1_000_000, "metrics": values}
            text = f"{json.dumps(line, ensure_ascii=False)}\n"
            rest = memoryview(text.encode(errors="backslashreplace"))  # half a surrogate pair as JSON's escape
            while rest:  # a full disk may take a part before it refuses
                rest = rest[self._file.write(rest) :]

    def sync(self) -> int:
        """Everything so far is on the disk; returns the size."""
        os.fsync(self._file.fileno())
        return self.size

    def rewind(self, size: int) -> None:
        """Forget what was logged after the file had ``size`` bytes, which ``sync`` has returned."""
        rows, end = self.read(0, size)
        self._file.truncate(end)
        self._file.seek(end)
        self._last = {name: (row.step, _plain(value)) for row in rows for name, value in row.metrics.items()}

    def read(self, start: int, stop: int | None = None) -> tuple[list[Row], int]:
        """The whole lines from byte ``start`` on, before ``stop``, and where the last of them ends."""
        content = os.pread(self._file.fileno(), max(0, (self.size if stop is None else stop) - start), start)
        whole = content[: content.rfind(b"\n") + 1]
        return _rows(whole, str(self._file.name)), start + len(whole)


def read_metrics(path: Path) -> list[Row]:
    """All rows of a file that this process does not write to. Raises FileNotFoundError."""
    content = path.read_bytes()
    return _rows(content[: content.rfind(b"\n") + 1], str(path))


def _rows(content: bytes, name: str) -> list[Row]:
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            found = json.loads(line)
            values = {key: float(value) for key, value in found["metrics"].items()}
            rows.append(Row(int(found["step"]), int(found["ms"]), values))
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.warning("%s: line %d holds no metrics (%.60r) and is left out", name, number, line)
    return rows


def _plain(value: Any) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)
