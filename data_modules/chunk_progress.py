"""Progress of a long task without a Trainer: a live bar on a terminal, a plain line per chunk elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self


class ChunkProgress:
    """Counts rollouts over chunks.

    Args:
        label: what is going on.
        total: rollouts over all chunks.
    """

    def __init__(self, label: str, total: int) -> None:
        from rich.console import Console

        self._label = label
        self._total = total
        self._before = 0  # rollouts of finished chunks
        self._console = Console(stderr=True)
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = ("{task.description}", BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
            figures = TextColumn("{task.fields[figures]}", markup=False)
            self._bar = Progress(*columns, figures, console=self._console)
            self._task = self._bar.add_task(self._label, total=self._total, figures="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def within_chunk(self, finished: int, expected: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._before + finished)

    def finish_chunk(self, rollouts: int, figures: str) -> None:
        self._before += rollouts
        if self._bar is not None:
            self._bar.update(self._task, completed=self._before, figures=figures)
        else:
            line = f"{self._label} {self._before}/{self._total} · {figures} · {time.monotonic() - self._start:.0f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
