"""Progress of training and evaluation: a plain line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from callbacks.tracking.run_info import duration
from retrieval.ranges import NonNegativeFloat

# In this order; of each row the first metric that the module logs is shown, under its label. An environment's tasks
# have no answer to compare: em says nothing where there is a success.
METRICS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("loss", "train/loss"),),
    (("ce", "train/ce"),),
    (("acc", "train/token_accuracy"),),
    (("success", "train/success"), ("em", "train/em")),
    (("reward", "train/reward"),),
    (("kl", "train/kl"),),
    (("entropy", "train/entropy"),),
    (("len", "train/response_tokens"),),
    (("tok/s", "throughput/tokens_per_s"),),
    (("val success", "val/reward/success"), ("val em", "val/em")),
)


def metrics_line(metrics: dict[str, Any], chosen: Iterable[str] = ()) -> str:
    """``em 0.312 · reward 0.300 · ...`` of those metrics that exist, and after them those that a module or callback of
    one's own has ``chosen`` (logged with ``prog_bar=True``)."""
    shown = []
    known = {name for alternatives in METRICS for _, name in alternatives}
    others = tuple(((name, name),) for name in chosen if name not in known)
    for alternatives in (*METRICS, *others):
        found = next(((label, float(metrics[name])) for label, name in alternatives if name in metrics), None)
        if found is not None:
            label, value = found
            shown.append(f"{label} {value:,.0f}" if abs(value) >= 100 else f"{label} {value:.3f}")
    return " · ".join(shown)


def fraction_done(trainer: L.Trainer) -> float:
    """How much of the training is done, in [0, 1], by whichever limit (steps or epochs) comes first; NaN: no limit."""
    shares = []
    if trainer.max_steps and trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    batches = trainer.num_training_batches
    if trainer.max_epochs and trainer.max_epochs > 0 and math.isfinite(batches) and batches > 0:
        shares.append((trainer.fit_loop.total_batch_idx + 1) / (batches * trainer.max_epochs))
    return min(1.0, max(shares)) if shares else math.nan


class Progress(ProgressBar):
    """Progress of training and evaluation, for both kinds of modules.

    Args:
        line_every_s: seconds between lines (the first and last iteration are always shown).
    """

    def __init__(self, line_every_s: NonNegativeFloat = 10.0) -> None:
        super().__init__()
        self.line_every_s = line_every_s
        self._enabled = True
        self._last_line = -math.inf
        self._start = (0.0, 0.0)  # when training started here, and the fraction done then (resume)
        self._label = ""

    # Lightning switches bars off on other ranks than 0
    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = (time.monotonic(), fraction_done(trainer))
        self._label = type(pl_module).__name__
        self._show("start", force=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        done = fraction_done(trainer)
        iteration = trainer.fit_loop.total_batch_idx + 1
        line = metrics_line(trainer.callback_metrics, trainer.progress_bar_metrics)
        text = f"iteration {iteration} · {line} · eta {duration(self._eta(done))}"
        self._show(text, done, force=iteration == 1 or done == 1.0)

    def _eta(self, done: float) -> float:
        since, before = self._start
        gained = done - before
        return (time.monotonic() - since) * (1 - done) / gained if gained > 0 else math.nan

    # --- evaluation ---------------------------------------------------------------------------------------------

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.sanity_checking:
            self._evaluation(pl_module, "validation", batch_idx, dataloader_idx, trainer.num_val_batches)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._evaluation(pl_module, "test", batch_idx, dataloader_idx, trainer.num_test_batches)

    def _evaluation(self, module: L.LightningModule, name: str, index: int, loader: int, batches: Any) -> None:
        self._label = type(module).__name__
        counts = [batches] if isinstance(batches, (int, float)) else list(batches)
        done, total = sum(counts[:loader]) + index + 1, sum(counts)
        self._show(f"{name} {done}/{total:g}", done / total, force=done == total)

    def _show(self, text: str, done: float = 0.0, force: bool = False) -> None:
        if self._enabled and (force or time.monotonic() - self._last_line >= self.line_every_s):
            self._last_line = time.monotonic()
            share = f"{done:4.0%} " if math.isfinite(done) else ""
            print(f"{self._label} {share}{text}", file=sys.stderr, flush=True)
