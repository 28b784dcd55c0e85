"""Evaluates every validation and test: scores, calls and stop reasons with intervals, logged and on disk."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning as L

from callbacks.evaluation.collector import RowCollector
from callbacks.evaluation.judging import JudgeProtocol, judge_rows
from callbacks.evaluation.statistics import Interval
from callbacks.evaluation.summary import summarize
from callbacks.evaluation.turn_scores import TURNS_PREFIX
from callbacks.evaluation_rows import AGENT, EvaluationRow, save_rows
from callbacks.tracking.run_info import run_info
from callbacks.trainer import stage_dir
from common.files import write_atomically
from common.ranges import PositiveInt
from rollout.trajectory import Task, Trajectory

ARCAP_PREFIX = "arcap/"
OTHERS = (ARCAP_PREFIX, TURNS_PREFIX, "continues/", "forks/", "with_skills")  # metrics that other callbacks write


class AnswersProtocol(Protocol):
    """Reads and scores answers as a released evaluation does. Annotated with Any: see ``judging.JudgeProtocol``."""

    def score(self, trajectory: Any) -> Any:
        """Return the answer of a ``Trajectory`` (None without one) and its scores: em, f1 and, for formulas, math."""
        ...


def log_metrics(
    module: L.LightningModule, split: str, metrics: Mapping[str, Interval], *, intervals: Iterable[str] = ()
) -> None:
    """Log the mean of each metric as ``<split>/<name>``. Metrics named in ``intervals`` are also logged as ``_low``,
    ``_high`` and ``_n``.

    Metrics without an observation are not logged. All ranks hold the same values: ``sync_dist`` changes nothing.
    """
    logged: dict[str, float] = {}
    for name, metric in metrics.items():
        if metric.n == 0:
            continue
        logged[f"{split}/{name}"] = metric.mean
        if name in intervals:
            logged |= {
                f"{split}/{name}_low": metric.low,
                f"{split}/{name}_high": metric.high,
                f"{split}/{name}_n": float(metric.n),
            }
    module.log_dict(logged, sync_dist=module.trainer.world_size > 1, batch_size=1)


def update_evaluation_file(
    path: Path, split: str, metrics: Mapping[str, Interval], owned: Callable[[str], bool], header: Mapping[str, Any]
) -> None:
    """Update the stage's ``evaluation.json``: replace the metrics that the caller owns, and keep all other metrics."""
    content = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: value for name, value in content.get(split, {}).items() if not owned(name)}
    content[split] = kept | {name: metric.as_json() for name, metric in metrics.items()}
    content |= header
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def add_metrics(
    trainer: L.Trainer, module: L.LightningModule, split: str, metrics: Mapping[str, Interval], prefix: str
) -> None:
    """Log a callback's metrics and write them into ``evaluation.json``. They replace the metrics whose names begin with
    ``prefix``."""
    assert prefix in OTHERS, f"{prefix} is not among OTHERS: Evaluation would take these metrics for its own"
    log_metrics(module, split, metrics)
    if trainer.is_global_zero:
        path = stage_dir(trainer) / "evaluation.json"
        update_evaluation_file(path, split, metrics, lambda name: name.startswith(prefix), {})


class Evaluation(RowCollector):
    """Scores every validation and test, logs the metrics (``summarize``) and writes them to the stage's output folder.

    Writes, in the stage folder, ``evaluation.json`` (metrics with n and 95 % bootstrap interval under "val" and
    "test", and seconds, commit, command) and ``evaluation/<split>.parquet`` (one row per question and prompt mode).
    EM and F1 are scored here from the parsed answer, whatever reward the run trains on. With a judge, every rank
    sends its answers at once after the last batch; ``evaluation.json`` has its prompt version and model under "judge".

    Args:
        resamples: of the bootstrap intervals.
        judge: judges the test's answers in addition (see ``judging.judge_rows``); null for none.
        answers: reads and scores the test's answers as a released evaluation (``rollout.rewards.arpo_evaluation``);
            null: the protocol's answer, with EM and F1 of ``rewards.scoring``.
    """

    def __init__(
        self,
        resamples: PositiveInt = 10_000,
        judge: JudgeProtocol | None = None,
        answers: AnswersProtocol | None = None,
    ) -> None:
        super().__init__()
        if resamples < 100:
            raise ValueError(f"Evaluation(resamples={resamples}): expected at least 100 for a 95 % interval")
        self.resamples = resamples
        self.judge, self.answers = judge, answers
        self._started: float | None = None
        self._earlier_seconds = 0.0  # of the runs this one resumes

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this stage so far, including the earlier parts of a resumed run."""
        return self._earlier_seconds + (time.monotonic() - self._started if self._started is not None else 0.0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._started is None:
            self._started = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Trainer.test with a checkpoint of this very run also comes here: its seconds are already counted.
        self._earlier_seconds = max(self._earlier_seconds, state_dict["seconds"] - self.seconds)

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        super().take(split, prompt_mode, trajectories)
        if self.answers is not None and split == "test" and prompt_mode == AGENT:
            first = len(self._rows) - len(trajectories)
            for position, trajectory in enumerate(trajectories, first):
                answer, scores = self.answers.score(trajectory)
                row = self._rows[position]
                parts = row.reward_parts | ({"math": scores["math"]} if "math" in scores else {})
                self._rows[position] = dataclasses.replace(
                    row, answer=answer, em=scores["em"], f1=scores["f1"], reward_parts=parts
                )

    def complete(self, split: str, rows: list[EvaluationRow], tasks: Mapping[str, Task]) -> list[EvaluationRow]:
        return rows if self.judge is None or split != "test" else judge_rows(self.judge, rows, tasks)

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str, rows: list[EvaluationRow]) -> None:
        metrics = summarize(rows, resamples=self.resamples)
        log_metrics(pl_module, split, metrics, intervals=("em", "f1", "acc"))
        if trainer.is_global_zero:
            folder = stage_dir(trainer)
            save_rows(folder / "evaluation" / f"{split}.parquet", rows)
            header = {"seconds": self.seconds, f"{split}_step": trainer.global_step, **run_info()}
            if self.judge is not None and split == "test":
                header["judge"] = {"prompt_version": self.judge.prompt_version, "model": self.judge.model}
            update_evaluation_file(
                folder / "evaluation.json", split, metrics, lambda name: not name.startswith(OTHERS), header
            )
