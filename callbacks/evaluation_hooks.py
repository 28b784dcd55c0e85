"""Base class of callbacks that read the trajectories of validations and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L

from callbacks.evaluation_rows import AGENT
from callbacks.trainer import data_module
from rollout.trajectory import Trajectory


def trajectories_of(outputs: Any, hook: str) -> list[Trajectory]:
    """Check that a validation or test step returned a list of trajectories, and return it.

    Raises:
        TypeError: it is not a list of trajectories.
    """
    if isinstance(outputs, list) and all(isinstance(item, Trajectory) for item in outputs):
        return outputs
    raise TypeError(f"{hook} returned {type(outputs).__name__}, expected the batch's list[Trajectory]")


def prompt_mode_of(trainer: L.Trainer, split: str, dataloader_idx: int) -> str:
    """Return the prompt mode (normal search loop or a diagnostic prompt) of an evaluation dataloader, from
    ``datamodule.prompt_modes(split)``.

    Raises:
        ValueError: several dataloaders, but the data module does not name them.
    """
    data = data_module(trainer)
    names = getattr(data, "prompt_modes", None)
    if names is None:
        if dataloader_idx == 0:
            return AGENT
        raise ValueError(
            f"found {split} dataloader number {dataloader_idx}, but {type(data).__name__} has no "
            "prompt_modes(split) that says which prompt each dataloader stands for"
        )
    known = list(names(split))
    if dataloader_idx >= len(known):
        raise ValueError(f"{split} dataloader {dataloader_idx} has no name; prompt_modes({split!r}) gave {known}")
    return str(known[dataloader_idx])


class EvaluationHooks(L.Callback):
    """Base class of callbacks that read every trajectory of a validation or test. ``split`` is "val" or "test"."""

    def begin(self, split: str) -> None:
        """Prepare for a validation or test; called before its first batch."""

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        """Process the trajectories of one batch of this rank. ``prompt_mode`` is ``AGENT`` for the normal search
        loop."""

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        """Complete a validation or test; called after its last batch, on every rank, also in Lightning's sanity
        check."""

    def _take(self, trainer: L.Trainer, split: str, outputs: Any, dataloader_idx: int) -> None:
        prompt_mode = prompt_mode_of(trainer, split, dataloader_idx)
        self.take(split, prompt_mode, trajectories_of(outputs, "test_step" if split == "test" else "validation_step"))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin("val")

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin("test")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._take(trainer, "val", outputs, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._take(trainer, "test", outputs, dataloader_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.finish(trainer, pl_module, "test")
