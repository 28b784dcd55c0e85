"""Writes the best and worst trajectories of each evaluation, and of some training iterations, as HTML pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import AGENT, row_of
from callbacks.tracking.mlflow_logger import MLflowLogger
from callbacks.tracking.trajectory_page import PageItem, render_page
from callbacks.trainer import policy_source, stage_dir
from common.files import write_atomically
from common.ranges import NonNegativeInt, PositiveInt
from common.ranks import gather_lists
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Trajectory

Annotated = tuple[Trajectory, dict[str, list[float]]]

_tokenizer = lru_cache(maxsize=4)(load_tokenizer)  # a page is written every few iterations


def rank_key(trajectory: Trajectory) -> tuple[float, float, int, str, int]:
    """Return the sort key of a trajectory, worst first: reward (EM without one), F1, then long before short.

    Group and index make the order total, so that it does not depend on the order of completion.
    """
    row = row_of(trajectory)
    total = trajectory.reward.total if trajectory.reward is not None else row.em
    return total, row.f1, -len(trajectory.response_ids), trajectory.group, trajectory.index


def best_and_worst(annotated: Iterable[Annotated], count: int) -> list[tuple[str, Annotated]]:
    """Choose at most ``count`` of the best and of the worst trajectories, as pairs ("best" or "worst", trajectory with
    values). Infrastructure failures are left out."""
    ranked = sorted((a for a in annotated if not a[0].left_out), key=lambda a: rank_key(a[0]))
    worst = ranked[: min(count, len(ranked) // 2)]
    best = ranked[len(worst) :][-count:]
    return [("best", a) for a in reversed(best)] + [("worst", a) for a in worst]


def heading(kind: str, trajectory: Trajectory) -> str:
    """Return the heading of a trajectory on a page, such as ``best: EM 1, answer``. Where the reward has a success, it
    replaces EM."""
    row = row_of(trajectory)
    success = row.reward_parts.get("success")
    score = f"EM {row.em:g}" if success is None else f"success {success:g}"
    return f"{kind}: {score}, {trajectory.stop_reason.value}"


class TrajectoryLog(EvaluationHooks):
    """Writes the best and worst trajectories as HTML pages: after each validation and test, and every ``train_every``
    training iterations. The pages are ``trajectories/<split>-<step>.html`` and ``trajectories/train-<iteration>.html``
    in the stage's output folder; MLflow gets a copy as artifact.

    Training pages show per-token metrics (advantage, reward, kl, ...) from the module's ``last_token_values``, a list
    (trajectory, {name: one value per response token}); a module without that attribute (supervised learning)
    has nothing to annotate and gets no training pages.

    Args:
        count: number of best and of worst trajectories.
        train_every: iterations between training pages; 0: none.
        tokenizer: folder of the tokenizer; default: the policy's.
    """

    def __init__(self, count: PositiveInt = 5, train_every: NonNegativeInt = 20, tokenizer: str | None = None) -> None:
        self.count = count
        self.train_every = train_every
        self.tokenizer = tokenizer
        self._kept: list[Annotated] = []

    # --- evaluation ---------------------------------------------------------------------------------------------

    def begin(self, split: str) -> None:
        self._kept = []

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        """Keep the best and the worst trajectories of all batches so far."""
        if prompt_mode == AGENT:
            pool = self._kept + [(t, {}) for t in trajectories]
            self._kept = [annotated for _, annotated in best_and_worst(pool, self.count)]

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        kept, self._kept = gather_lists(self._kept), []
        if trainer.is_global_zero and not trainer.sanity_checking and kept:
            step = trainer.global_step
            self._write(trainer, pl_module, f"{split}-{step:06d}", f"{split}, step {step}", kept)

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        iteration = trainer.fit_loop.total_batch_idx + 1
        annotated = getattr(pl_module, "last_token_values", None)
        if annotated is None or not self.train_every or iteration % self.train_every or not trainer.is_global_zero:
            return
        self._write(trainer, pl_module, f"train-{iteration:06d}", f"training, iteration {iteration}", annotated)

    def _write(
        self, trainer: L.Trainer, module: L.LightningModule, name: str, title: str, annotated: Iterable[Annotated]
    ) -> Path:
        chosen = best_and_worst(annotated, self.count)
        items = [PageItem(t, heading(kind, t), signals) for kind, (t, signals) in chosen]
        tokenizer = _tokenizer(self.tokenizer or policy_source(module))
        path = stage_dir(trainer) / "trajectories" / f"{name}.html"
        write_atomically(path, render_page(f"{stage_dir(trainer).parent.name}: {title}", items, tokenizer))
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_file(path, "trajectories")
        return path
