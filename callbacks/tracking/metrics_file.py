"""``metrics.jsonl`` of a run: every logged value, on the disk before MLflow has it. Imports neither torch nor MLflow.

A line is ``{"step": 3, "ms": 1764126000000, "metrics": {"train/loss": 0.5}}``. A value that is not finite is text, as
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
    """One line of ``metrics.jsonl``: the metrics that one call of ``MetricsFile.append`` wrote."""

    step: int
    ms: int  # since the epoch
    metrics: Mapping[str, float]


class MetricsFile:
    """The metrics file (``metrics.jsonl``) of this process's run, which can be read while it grows.

    Skips a value that was already written under the same name and step. Cuts off a line that a kill has left
    incomplete.

    Args:
        path: default: a temporary file.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", buffering=0) if path is not None else tempfile.TemporaryFile(buffering=0)
        self._last: dict[str, tuple[int, Any]] = {}
        self.rewind(self._size())

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def append(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append the metrics of one step to the file, without text values and repeated values."""
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
        """Flush the metrics file to disk (fsync) and return its size in bytes."""
        os.fsync(self._file.fileno())
        return self._size()

    def rewind(self, size: int) -> None:
        """Truncate the metrics file to ``size`` bytes, as ``sync`` returned them: later metrics are dropped."""
        rows, end = self.read(0, size)
        self._file.truncate(end)
        self._file.seek(end)
        self._last = {name: (row.step, _plain(value)) for row in rows for name, value in row.metrics.items()}

    def read(self, start: int, stop: int | None = None) -> tuple[list[Row], int]:
        """Return the complete lines between bytes ``start`` and ``stop`` of the metrics file, and the byte at which the
        last line ends."""
        content = os.pread(self._file.fileno(), max(0, (self._size() if stop is None else stop) - start), start)
        rows, length = _rows(content, str(self._file.name))
        return rows, start + length


def read_metrics(path: Path) -> list[Row]:
    """Read all rows of a metrics file (``metrics.jsonl``) that this process does not write to. Raises
    FileNotFoundError."""
    return _rows(path.read_bytes(), str(path))[0]


def _rows(content: bytes, name: str) -> tuple[list[Row], int]:
    """Parse the complete lines of a metrics file. Returns the rows, and the length of these lines in bytes."""
    content = content[: content.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            found = json.loads(line)
            values = {key: float(value) for key, value in found["metrics"].items()}
            rows.append(Row(int(found["step"]), int(found["ms"]), values))
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.warning("%s: line %d holds no metrics (%.60r) and is left out", name, number, line)
    return rows, len(content)


def _plain(value: Any) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)
