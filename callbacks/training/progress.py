"""Reports the progress of training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from common.progress_reports import ProgressReports

# Most informative first, because a bar fits two or three. Each row shows the first metric that the module logs, under
# its label. Tasks of an environment have a success but no answer for em.
METRICS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("reward", "train/reward"), ("loss", "train/loss")),
    (("success", "train/success"), ("em", "train/em")),
    (("val success", "val/reward/success"), ("val em", "val/em")),
    (("loss", "train/loss"),),
    (("kl", "train/kl"),),
    (("acc", "train/token_accuracy"),),
    (("entropy", "train/entropy"),),
    (("len", "train/response_tokens"),),
    (("tok/s", "throughput/tokens_per_s"),),
)


def figures(metrics: Mapping[str, Any], chosen: Iterable[str] = ()) -> list[str]:
    """Return the texts of the progress line, such as ``["reward 0.300", "em 0.312"]``, for the metrics that exist. The
    metrics in ``chosen`` (logged with ``prog_bar=True``) come last."""
    shown: dict[str, str] = {}
    known = {name for alternatives in METRICS for _, name in alternatives}
    others = tuple(((name, name),) for name in chosen if name not in known)
    for alternatives in (*METRICS, *others):
        found = next(((label, float(metrics[name])) for label, name in alternatives if name in metrics), None)
        if found is not None:
            label, value = found
            shown[label] = f"{label} {value:,.0f}" if abs(value) >= 100 else f"{label} {value:.3f}"
    return list(shown.values())


def fraction_done(trainer: L.Trainer) -> float:
    """Return the completed share of the training, in [0, 1], by the limit (steps or epochs) that comes first. NaN
    without a limit."""
    shares = []
    if trainer.max_steps and trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    batches = trainer.num_training_batches
    if trainer.max_epochs and trainer.max_epochs > 0 and math.isfinite(batches) and batches > 0:
        shares.append((trainer.fit_loop.total_batch_idx + 1) / (batches * trainer.max_epochs))
    return min(1.0, max(shares)) if shares else math.nan


class Progress(ProgressBar):
    """Reports the progress of training, validation and test (``common.progress_reports``)."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._reports = ProgressReports()
        self._evaluation = ("test", 0, 1.0)  # phase, batches done, batches in all

    # Lightning switches bars off on other ranks than 0
    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled:
            self._reports.begin("train", fraction_done(trainer))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._enabled:
            iteration = f"iteration {trainer.fit_loop.total_batch_idx + 1}"
            shown = figures(trainer.callback_metrics, trainer.progress_bar_metrics)
            self._reports.report("train", fraction_done(trainer), [*shown, iteration])

    # --- evaluation ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin_evaluation("validate", trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin_evaluation("test", trainer.num_test_batches)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.sanity_checking:
            self._batch_evaluated()

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._batch_evaluated()

    def rolled_out(self, finished: int, expected: int) -> None:
        """Report that ``finished`` of ``expected`` trajectories of an evaluation batch are complete. The data module
        calls this."""
        phase, batches, total = self._evaluation
        if self._enabled and finished < expected and not self.trainer.sanity_checking:
            self._reports.report(phase, (batches + finished / expected) / total)

    def _begin_evaluation(self, phase: str, batches: Any) -> None:
        self._evaluation = (phase, 0, sum([batches] if isinstance(batches, (int, float)) else batches))
        if self._enabled:
            self._reports.begin(phase)

    def _batch_evaluated(self) -> None:
        phase, batches, total = self._evaluation
        self._evaluation = (phase, batches + 1, total)
        if self._enabled:
            self._reports.report(phase, (batches + 1) / total)
