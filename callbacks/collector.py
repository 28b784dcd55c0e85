"""From what validation and test steps return to rows, over all dataloaders and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

from callbacks.common import gather_lists
from callbacks.rows import AGENT, EvaluationRow, row_of
from rollout.trajectory import Task, Trajectory


def trajectories_of(outputs: Any, hook: str) -> list[Trajectory]:
    """Check what a validation or test step returned.

    Raises:
        TypeError: it is not a list of trajectories.
    """
    if isinstance(outputs, list) and all(isinstance(item, Trajectory) for item in outputs):
        return outputs
    raise TypeError(f"{hook} returned {type(outputs).__name__}, expected the batch's list[Trajectory]")


def probe_of(trainer: L.Trainer, split: str, dataloader_idx: int) -> str:
    """Name of the probe behind one evaluation dataloader, from ``datamodule.probe_names(split)``.

    Raises:
        ValueError: several dataloaders, but the data module does not name them.
    """
    names = getattr(trainer.datamodule, "probe_names", None)
    if names is None:
        if dataloader_idx == 0:
            return AGENT
        raise ValueError(
            f"found {split} dataloader number {dataloader_idx}, but {type(trainer.datamodule).__name__} has no "
            "probe_names(split) that says which prompt each dataloader stands for"
        )
    known = list(names(split))
    if dataloader_idx >= len(known):
        raise ValueError(f"{split} dataloader {dataloader_idx} has no name; probe_names({split!r}) gave {known}")
    return str(known[dataloader_idx])


class RowCollector(L.Callback):
    """Base of the evaluation callbacks: collects the rows of one evaluation over all dataloaders and ranks, then
    calls ``report`` once, with the same rows on every rank."""

    def __init__(self) -> None:
        self._rows: list[EvaluationRow] = []
        self._tasks: dict[str, Task] = {}  # by id, of those rows

    def complete(self, split: str, rows: list[EvaluationRow], tasks: Mapping[str, Task]) -> list[EvaluationRow]:
        """What is added to this rank's own rows, all of the evaluation's, before they are gathered: here nothing."""
        return rows

    def report(
        self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]
    ) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._rows, self._tasks = [], {}

    def _collect(self, trainer: L.Trainer, split: str, outputs: Any, dataloader_idx: int) -> None:
        probe = probe_of(trainer, split, dataloader_idx)
        hook = "test_step" if split == "test" else "validation_step"
        trajectories = trajectories_of(outputs, hook)
        self._rows += [row_of(trajectory, probe) for trajectory in trajectories]
        self._tasks |= {trajectory.task.id: trajectory.task for trajectory in trajectories}

    def _finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        rows, tasks = self._rows, self._tasks
        self._start()
        if not trainer.sanity_checking:
            self.report(trainer, pl_module, split, gather_lists(self.complete(split, rows, tasks)))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start()

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(trainer, "val", outputs, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(trainer, "test", outputs, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module, "test")
