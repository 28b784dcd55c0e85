"""The figures that matter, on one line: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Optional

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from callbacks.records import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# In this order; of each row the first metric that the module logs is shown, under its label. An environment's tasks
# have no answer to compare: em says nothing where there is a success.
FIGURES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("loss", "train/loss"),),
    (("ce", "train/ce"),),
    (("acc", "train/token_accuracy"),),
    (("success", "train/success"), ("em", "train/em")),
    (("reward", "train/reward"),),
    (("kl", "train/kl_teacher"), ("kl", "train/kl")),
    (("entropy", "train/entropy"),),
    (("len", "train/response_tokens"),),
    (("tok/s", "throughput/tokens_per_s"),),
    (("val success", "val/reward/success"), ("val em", "val/em")),
)


def figures_line(metrics: dict[str, Any]) -> str:
    """``em 0.312 · reward 0.300 · ...`` of those metrics that exist."""
    shown = []
    for alternatives in FIGURES:
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
        line_every_s: seconds between lines when the output is not a terminal (the first and last iteration are
            always shown).
    """

    def __init__(self, line_every_s: float = 30.0) -> None:
        super().__init__()
        self.line_every_s = line_every_s
        self._enabled = True
        self._console: Optional[Console] = None
        self._bar: Optional[RichProgress] = None
        self._task: Optional[TaskID] = None
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
        self._show(trainer, "start", force=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        done = fraction_done(trainer)
        iteration = trainer.fit_loop.total_batch_idx + 1
        text = f"iteration {iteration} · {figures_line(trainer.callback_metrics)} · eta {duration(self._eta(done))}"
        self._show(trainer, text, done, force=iteration == 1 or done == 1.0)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _eta(self, done: float) -> float:
        since, before = self._start
        gained = done - before
        return (time.monotonic() - since) * (1 - done) / gained if gained > 0 else math.nan

    # --- evaluation ---------------------------------------------------------------------------------------------

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._evaluation(trainer, pl_module, "validation", batch_idx, dataloader_idx, trainer.num_val_batches)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluation(trainer, pl_module, "test", batch_idx, dataloader_idx, trainer.num_test_batches)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def _evaluation(
        self, trainer: L.Trainer, module: L.LightningModule, name: str, index: int, loader: int, batches: Any
    ) -> None:
        self._label = type(module).__name__
        counts = [batches] if isinstance(batches, (int, float)) else list(batches)
        done, total = sum(counts[:loader]) + index + 1, sum(counts)
        self._show(trainer, f"{name} {done}/{total:g}", done / total, force=done == total)

    # --- drawing ------------------------------------------------------------------------------------------------

    def _show(self, trainer: L.Trainer, text: str, done: float = 0.0, force: bool = False) -> None:
        if not self._enabled:
            return
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        if self._console.is_terminal:
            self._draw(text, done)
        elif force or time.monotonic() - self._last_line >= self.line_every_s:
            self._last_line = time.monotonic()
            share = f"{done:4.0%} " if math.isfinite(done) else ""
            self._console.print(f"{self._label} {share}{text}", highlight=False, markup=False, soft_wrap=True)

    def _draw(self, text: str, done: float) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = ("{task.fields[label]}", BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn())
            text_column = TextColumn("{task.fields[text]}", markup=False)
            self._bar = RichProgress(*columns, text_column, console=self._console)
            self._task = self._bar.add_task("", total=1.0, label=self._label, text=text)
            self._bar.start()
        completed = done if math.isfinite(done) else 0.0
        self._bar.update(self._task, completed=completed, label=self._label, text=text)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._last_line = -math.inf
