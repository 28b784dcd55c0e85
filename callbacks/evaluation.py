"""Exact match, F1, stop reasons and searches of every validation and test, with intervals, logged and on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.common import stage_dir
from callbacks.records import provenance
from callbacks.rows import AGENT, EvaluationRow, RowCollector, save_rows
from callbacks.statistics import Interval, bootstrap_interval
from rollout.files import write_atomically
from rollout.trajectory import StopReason

ARCAP_PREFIX = "arcap/"


def by_source(rows: Sequence[EvaluationRow]) -> dict[str, list[EvaluationRow]]:
    """Rows by data source, sorted by its name."""
    sources = sorted({row.data_source for row in rows})
    return {source: [row for row in rows if row.data_source == source] for source in sources}


def summarize(rows: Sequence[EvaluationRow], *, resamples: int = 10_000) -> dict[str, Interval]:
    """Figures of the normal search loop. Rows that infrastructure spoiled are left out (their share is
    ``infrastructure_failures``, the only figure they enter).

    Keys: ``em``, ``f1``, ``em/<data source>``, ``f1/<data source>``, ``stop/<reason>`` (shares, all reasons),
    ``searches`` (executed, per question), ``response_tokens`` (sampled, per question), ``valid_actions``
    (share of turns, pooled; its n counts turns), ``infrastructure_failures``.
    """
    agent = [row for row in rows if row.probe == AGENT]
    scored = [row for row in agent if not row.failed]

    def interval(values: Iterable[float]) -> Interval:
        return bootstrap_interval(list(values), resamples=resamples)

    figures = {"em": interval(row.em for row in scored), "f1": interval(row.f1 for row in scored)}
    for source, part in by_source(scored).items():
        figures[f"em/{source}"] = interval(row.em for row in part)
        figures[f"f1/{source}"] = interval(row.f1 for row in part)
    for reason in StopReason:
        if reason is not StopReason.INFRASTRUCTURE:
            figures[f"stop/{reason.value}"] = interval(float(row.stop_reason == reason.value) for row in scored)
    figures["searches"] = interval(row.executed_searches for row in scored)
    figures["response_tokens"] = interval(row.response_tokens for row in scored)
    figures["valid_actions"] = interval(
        flag for row in scored for flag in [1.0] * row.valid_turns + [0.0] * (row.turns - row.valid_turns)
    )
    figures["infrastructure_failures"] = interval(float(row.failed) for row in agent)
    return figures


def log_figures(
    module: L.LightningModule, split: str, figures: Mapping[str, Interval], *, intervals: Iterable[str] = ()
) -> None:
    """Log the means as ``<split>/<name>``, and for the names in ``intervals`` also ``_low``, ``_high`` and ``_n``.
    Figures without a single observation are not logged. Every rank holds the same values, so the mean over ranks
    that ``sync_dist`` takes changes nothing; it only keeps Lightning's per-rank metrics equal by contract."""
    metrics: dict[str, float] = {}
    for name, figure in figures.items():
        if figure.n == 0:
            continue
        metrics[f"{split}/{name}"] = figure.mean
        if name in intervals:
            metrics |= {
                f"{split}/{name}_low": figure.low,
                f"{split}/{name}_high": figure.high,
                f"{split}/{name}_n": float(figure.n),
            }
    module.log_dict(metrics, sync_dist=module.trainer.world_size > 1, batch_size=1)


def update_evaluation_file(
    path: Path, split: str, figures: Mapping[str, Interval], owned: Callable[[str], bool], header: Mapping[str, Any]
) -> None:
    """Replace the figures that the caller owns in ``evaluation.json`` and leave the others as they are, so that
    several callbacks may write it in any order."""
    content = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: value for name, value in content.get(split, {}).items() if not owned(name)}
    content[split] = kept | {name: figure.as_json() for name, figure in figures.items()}
    content |= header
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


class Evaluation(RowCollector):
    """Scores every validation and test; see ``summarize`` for the figures.

    Writes, in the stage folder, ``evaluation.json`` (figures with n and 95 % bootstrap interval under "val" and
    "test", and seconds, commit, command) and ``evaluation/<split>.parquet`` (one row per question and probe).
    EM and F1 are scored here from the parsed answer, whatever reward the run trains on.
    """

    def __init__(self, resamples: int = 10_000) -> None:
        super().__init__()
        if resamples < 100:
            raise ValueError(f"Evaluation(resamples={resamples}): expected at least 100 for a 95 % interval")
        self.resamples = resamples
        self._started: float | None = None
        self._earlier_seconds = 0.0  # of the runs this one resumes

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this stage so far, earlier parts of a resumed run included."""
        return self._earlier_seconds + (time.monotonic() - self._started if self._started is not None else 0.0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._started is None:
            self._started = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Trainer.test with a checkpoint of this very run also comes here: its seconds are already counted.
        self._earlier_seconds = max(self._earlier_seconds, state_dict["seconds"] - self.seconds)

    def report(
        self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]
    ) -> None:
        figures = summarize(rows, resamples=self.resamples)
        log_figures(pl_module, split, figures, intervals=("em", "f1"))
        if trainer.is_global_zero:
            folder = stage_dir(trainer)
            save_rows(folder / "evaluation" / f"{split}.parquet", rows)
            header = {"seconds": self.seconds, f"{split}_step": trainer.global_step, **provenance()}
            update_evaluation_file(
                folder / "evaluation.json", split, figures, lambda name: not name.startswith(ARCAP_PREFIX), header
            )
