"""Base class of evaluation callbacks that collect rows over all dataloaders and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning as L

from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import EvaluationRow, row_of
from common.ranks import gather_lists
from rollout.trajectory import Task, Trajectory


class RowCollector(EvaluationHooks):
    """Collects the evaluation rows (one per trajectory) of all dataloaders and ranks, then calls ``report`` once on
    every rank."""

    def __init__(self) -> None:
        self._rows: list[EvaluationRow] = []
        self._tasks: dict[str, Task] = {}  # by id, of those rows

    def complete(self, split: str, rows: list[EvaluationRow], tasks: Mapping[str, Task]) -> list[EvaluationRow]:
        """Return this rank's evaluation rows, completed (for example by a judge), before all ranks' rows are gathered.
        The default returns them unchanged."""
        return rows

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]) -> None:
        raise NotImplementedError

    def begin(self, split: str) -> None:
        self._rows, self._tasks = [], {}

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        self._rows += [row_of(trajectory, prompt_mode) for trajectory in trajectories]
        self._tasks |= {trajectory.task.id: trajectory.task for trajectory in trajectories}

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        rows, tasks = self._rows, self._tasks
        self.begin(split)
        if not trainer.sanity_checking:
            self.report(trainer, pl_module, split, gather_lists(self.complete(split, rows, tasks)))
