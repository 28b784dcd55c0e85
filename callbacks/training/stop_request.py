"""Stopping a training on request, at the end of an iteration and with a checkpoint. Imports without torch.

Whoever runs the stage leaves a file in its folder (``ask``), on a time limit for instance; rank 0 finds it after the
iteration, all ranks learn of it at the same place, and ``IterationCheckpoint`` saves and raises ``StopRequested``.
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
    """The training was asked to stop and has saved its state."""


def ask(folder: Path) -> None:
    """Ask the training that works in a stage's ``folder`` to stop."""
    (folder / REQUEST).touch()


def forget(folder: Path) -> None:
    """Remove what an earlier request has left."""
    for name in (REQUEST, STOPPED):
        (folder / name).unlink(missing_ok=True)


def is_asked(trainer: L.Trainer, folder: Path) -> bool:
    """Whether the training is to stop, by what rank 0 sees: the same on every rank. Every rank must call."""
    asked = trainer.is_global_zero and (folder / REQUEST).exists()
    return bool(trainer.strategy.broadcast(asked)) if trainer.world_size > 1 else asked
