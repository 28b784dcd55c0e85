"""Stops a training run on request, after an iteration and with a checkpoint. Imports no torch.

``ask`` leaves a file in the stage's folder. Rank 0 looks for it after each iteration. ``IterationCheckpoint`` then
saves and raises ``StopRequested`` on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.tracking.run_info import RunStopped

if TYPE_CHECKING:
    import lightning as L

REQUEST = "stop_requested"
STOPPED = "stopped_on_request"


class StopRequested(RunStopped):
    """Raised when the training run was asked to stop and has saved its state."""


def ask(folder: Path) -> None:
    """Ask the training run in a stage's output ``folder`` to stop, by creating a file there."""
    (folder / REQUEST).touch()


def forget(folder: Path) -> None:
    """Remove the files of an earlier stop request from the stage's output folder."""
    for name in (REQUEST, STOPPED):
        (folder / name).unlink(missing_ok=True)


def is_asked(trainer: L.Trainer, folder: Path) -> bool:
    """Return whether the training run was asked to stop. Rank 0 looks for the file, and tells all ranks. A
    collective."""
    asked = trainer.is_global_zero and (folder / REQUEST).exists()
    return bool(trainer.strategy.broadcast(asked)) if trainer.world_size > 1 else asked
