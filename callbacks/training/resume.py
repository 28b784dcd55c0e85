"""Saves checkpoints after training iterations; a killed run continues exactly from the last one."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.trainer import is_better, stage_dir
from callbacks.training.checkpoint_files import (
    BEST,
    FOLDER,
    LAST,
    find_checkpoint,
    iteration_of,
    numbered,
    remove_checkpoint,
    size_of,
)
from callbacks.training.stop_request import StopRequested, is_asked
from common.digests import files_of, list_path, sha256, write_list
from common.files import DiskFullError, is_no_room, link_atomically, no_room_message, remove
from common.ranges import PositiveInt
from common.ranks import gather_objects

logger = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """Return the states of all random generators (Python, numpy, torch, CUDA), in types that
    ``torch.load(weights_only=True)`` reads."""
    kind, keys, position, has_gauss, cached = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def derived_seed(states: list[dict[str, Any]], rank: int, ranks: int) -> int:
    """Derive a random seed for ``rank`` from saved generator ``states``, when a run resumes with another number of
    ranks."""
    digest = hashlib.blake2b(repr((rank, ranks)).encode(), digest_size=4)
    for state in states:
        digest.update(repr((state["python"], state["numpy"])).encode())
        digest.update(state["torch"].cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def set_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # the GPUs' too


class IterationCheckpoint(Checkpoint):
    """Saves the whole training state every ``every_n_iterations``, so that a killed run loses no more than these
    iterations.

    Each save writes ``checkpoints/iteration-<n>.ckpt`` (a folder under DeepSpeed), links ``last.ckpt`` to it, and keeps
    the previous checkpoint and the best one (``best.ckpt``). The links are for people: a run continues from the newest
    checkpoint that agrees with its SHA-256 (``settle_checkpoints``).

    The continuation is exact: a checkpoint holds weights, optimiser, schedulers, loop progress, the position in the
    data, the length of the metrics file, and every rank's random generators. With another number of ranks or another
    strategy, only the generators start from new seeds. When a validation follows the iteration, the save comes after
    it, because Lightning would skip the validation on resume.

    When a stop is requested (``stop_request``), the callback saves after the current iteration and stops the training.

    Args:
        every_n_iterations: one iteration is one training batch (in on-policy stages one rollout batch).
        keep_best: also keep the checkpoint with the best ``monitor`` (read after each validation).
        monitor, mode: the metric, and whether larger ("max") or smaller ("min") is better.

    Raises (while training):
        DiskFullError: the disk is full; the previous checkpoint is intact.
        StopRequested: on every rank, after the checkpoint.
    """

    phase = "checkpoint"

    def __init__(
        self,
        every_n_iterations: PositiveInt = 1,
        keep_best: bool = True,
        monitor: str = "val/acc",
        mode: Literal["max", "min"] = "max",
    ) -> None:
        self.every_n_iterations = every_n_iterations
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.best_score: float | None = None
        self._best: str | None = None  # the checkpoint with that score
        self.seconds = 0.0  # spent saving so far; throughput.py reads it
        self._saved: int | None = None  # iterations done at the last save
        self._rng_states: list[dict[str, Any]] | None = None  # read from a checkpoint, by rank
        self._to_stop = False
        self._logged: list[int] = []  # how far the loggers' files had come, of rank 0

    # --- when -------------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._to_stop = is_asked(trainer, stage_dir(trainer))
        if self._due(trainer) and not self._validation_follows(trainer):
            # Lightning logs the iteration after this hook. A kill in between would lose its metrics, because a resumed
            # run does not repeat the iteration. MLflowLogger drops the second copy.
            trainer._logger_connector.update_train_step_metrics()
            self._save(trainer)
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = trainer.callback_metrics.get(self.monitor)
        improved = False
        if self.keep_best and value is not None and is_better(float(value), self.best_score, self.mode):
            improved, self.best_score = True, float(value)
        if improved or self._due(trainer):
            self._save(trainer, best=improved)
        self._stop_if_asked(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved != self._iterations(trainer):
            self._save(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._rng_states is None:
            return
        if len(self._rng_states) == trainer.world_size:
            set_rng_state(self._rng_states[trainer.global_rank])
        else:
            set_seeds(derived_seed(self._rng_states, trainer.global_rank, trainer.world_size))
            if trainer.is_global_zero:
                logger.warning(
                    "the checkpoint was written by %d ranks, this run has %d: weights, optimiser, schedules and the "
                    "position in the data continue exactly; the ranks' random generators (dropout) start from new "
                    "seeds derived from the saved states",
                    len(self._rng_states), trainer.world_size,
                )  # fmt: skip
        self._rng_states = None
        self._saved = self._iterations(trainer)
        epoch_loop = trainer.fit_loop.epoch_loop
        epoch_is_over = epoch_loop.batch_progress.current.ready >= trainer.num_training_batches
        if epoch_is_over and epoch_loop.restarted_on_train_batch_end:
            # The next epoch will use the iterator that Lightning built before the generators were restored (and will
            # not build another, as it does after a save in validation). A shuffling loader draws its order there.
            iter(cast(Any, trainer.fit_loop._data_fetcher))

    def _iterations(self, trainer: L.Trainer) -> int:
        return trainer.fit_loop.total_batch_idx + 1

    def _due(self, trainer: L.Trainer) -> bool:
        return self._to_stop or self._iterations(trainer) % self.every_n_iterations == 0

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        if self._to_stop:
            raise StopRequested(f"stopped on request after iteration {self._iterations(trainer)}, with a checkpoint")

    def _validation_follows(self, trainer: L.Trainer) -> bool:
        fit_loop = trainer.fit_loop
        return fit_loop.epoch_loop._should_check_val_fx(cast(Any, fit_loop._data_fetcher))

    # --- what -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        best = {"best_score": self.best_score, "best": self._best, "monitor": (self.monitor, self.mode)}
        return {"rng": gather_objects(rng_state()), "logged": self._logged, **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rng_states = state_dict["rng"]
        self._best = state_dict.get("best")
        if state_dict.get("monitor", (self.monitor, self.mode)) == (self.monitor, self.mode):
            self.best_score = state_dict["best_score"]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Truncate the metrics file to its length at the time of the checkpoint.

        Raises:
            ValueError: another data module wrote the checkpoint, or its file name has another iteration than its
                content.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        name = type(data).__qualname__
        if data is not None and data.state_dict() and name not in checkpoint:
            raise ValueError(
                f"the checkpoint holds no position in the data of a {name}: it was written with another data module. "
                "Resume with that one, or start a new run"
            )
        path = Path(trainer.ckpt_path or "").resolve()
        done = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        if iteration_of(path) not in (None, done):
            raise ValueError(f"{path} holds iteration {done}: it was renamed. Give it its own number, or remove it")
        logged = checkpoint["callbacks"].get(self.state_key, {}).get("logged", ())
        for logger, position in zip(_metric_loggers(trainer), logged, strict=False):
            logger.rewind(position)

    # --- how --------------------------------------------------------------------------------------------------

    def _save(self, trainer: L.Trainer, best: bool = False) -> None:
        start = time.perf_counter()
        folder = stage_dir(trainer) / FOLDER
        iteration = self._iterations(trainer)
        target = folder / f"iteration-{iteration:08d}.ckpt"
        temporary = folder / f".{target.name}.tmp"
        self._best = target.name if best else self._best
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            self._check_room(target)
        self._logged = [logger.sync() for logger in _metric_loggers(trainer)]
        trainer.strategy.barrier("checkpoint folder")
        try:
            trainer.save_checkpoint(temporary, weights_only=False)
            digests = _digests(temporary, trainer.global_rank, trainer.world_size)
        except (OSError, RuntimeError) as error:
            if not is_no_room(error):
                raise
            remove(temporary)
            raise DiskFullError(no_room_message(target, self._intact(folder))) from error
        if trainer.is_global_zero:
            self._publish(temporary, target, digests)
        trainer.strategy.barrier("checkpoint written")
        self._saved = iteration
        self.seconds += time.perf_counter() - start

    def _check_room(self, target: Path) -> None:
        """Raise DiskFullError if the checkpoint does not fit on the disk, after deleting older checkpoints if
        needed."""
        folder = target.parent
        if (last := find_checkpoint(folder.parent)) is None:
            return
        needed, spare = size_of(last), self._superseded(target)
        while (stat := os.statvfs(folder)).f_bavail * stat.f_frsize < needed:
            if not spare:
                raise DiskFullError(no_room_message(target, self._intact(folder)))
            remove_checkpoint(spare.pop())

    def _intact(self, folder: Path) -> str:
        previous = find_checkpoint(folder.parent)
        return (
            f"The previous checkpoint, {previous.resolve().name}, is intact."
            if previous
            else "There is no earlier checkpoint of this stage."
        )

    def _superseded(self, target: Path) -> list[Path]:
        """Return the paths of checkpoints that may be deleted: those older than the one before ``target``, newest
        first, without the best one."""
        best = {self._best, (target.parent / BEST).resolve().name}
        older = [path for path in numbered(target.parent.parent) if path.name < target.name]
        return [path for path in older[1:] if path.name not in best]

    def _publish(self, temporary: Path, target: Path, digests: dict[str, str]) -> None:
        folder = target.parent
        remove_checkpoint(target)
        if temporary.is_dir():
            write_list(temporary, digests, target.name)
        else:
            write_list(target, dict(zip((target.name,), digests.values(), strict=True)), target.name)
        os.rename(temporary, target)
        if self._best is not None and (folder / self._best).exists():
            link_atomically(folder / BEST, self._best)
        link_atomically(folder / LAST, target.name)
        for path in self._superseded(target):
            remove_checkpoint(path)


def _metric_loggers(trainer: L.Trainer) -> list[MLflowLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, MLflowLogger)]


def _digests(checkpoint: Path, rank: int, ranks: int) -> dict[str, str]:
    """Compute the SHA-256 of every file of a checkpoint, as {name: digest}. Each rank hashes a share. A collective."""
    folder = list_path(checkpoint).parent
    mine = [file.relative_to(folder).as_posix() for file in files_of(checkpoint)]
    names = sorted({name for seen in gather_objects(mine) for name in seen})
    shares = gather_objects({name: sha256(folder / name, sync=True) for name in names[rank::ranks]})
    return {name: digest for share in shares for name, digest in share.items()}
