"""Reads finished stages: their evaluation files, and scores pooled over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from callbacks.evaluation.attempts import FIELDS, pooled_metric, questions_of
from callbacks.evaluation.statistics import PairedDifference, bootstrap_seeds, paired_bootstrap
from callbacks.evaluation_rows import AGENT
from callbacks.tracking.run_info import TRAINING_FILE
from experiments.registry.columns import OVER_ATTEMPTS, SCORES, Column, Score


@dataclass(frozen=True, slots=True)
class Run:
    """One finished stage as the results page needs it."""

    experiment: str
    method: str  # what it is called in tables
    seed: int
    folder: Path
    seconds: float
    command: str
    commit: str
    sampled: Path | None = None  # folder of the same model's test at temperature 1, if there is one
    model: Path | None = None  # folder of the tested model, which holds its tokenizer; None: in the stage's
    fixed_seed: bool = False  # the same one for every seed of the methods that it is compared with
    group: str | None = None  # what the method's name ends with, if it is compared with those alone that share it

    @property
    def ungrouped(self) -> str:
        """The method's name without its group."""
        return self.method.removesuffix(f", {self.group}")

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        """From a mapping with name, label, seed, folder, seconds, command, commit and perhaps sampled, model,
        fixed_seed, group."""
        folders = {name: Path(row[name]) if row.get(name) else None for name in ("sampled", "model")}
        return cls(
            experiment=row["name"], method=row["label"], seed=row["seed"], folder=Path(row["folder"]),
            seconds=row["seconds"], command=row["command"], commit=row["commit"],
            fixed_seed=row.get("fixed_seed", False), group=row.get("group"), **folders,
        )  # fmt: skip


def read_evaluation(path: Path) -> dict[str, Any]:
    """``evaluation.json`` of a stage that was tested; ``path`` is the file or the stage's folder.

    Raises:
        FileNotFoundError: no such file. ValueError: it holds no test.
    """
    path = Path(path)
    path = path if path.suffix == ".json" else path / "evaluation.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected the evaluation of a stage that was tested")
    content = json.loads(path.read_text())
    if "test" not in content:
        raise ValueError(f"{path} holds {sorted(content)} but no 'test'; was the stage stopped before its test?")
    return content


def read_training(folder: Path) -> dict[str, Any] | None:
    """``training.json`` of a stage; None for one that was not trained on rollouts, or before there was such a file."""
    path = Path(folder) / TRAINING_FILE
    return json.loads(path.read_text()) if path.exists() else None


def question_frame(folder: Path) -> pl.DataFrame:
    """Rows of the normal search loop in a stage's test, without those that infrastructure spoiled. Files of earlier
    versions lack some columns."""
    frame = pl.read_parquet(Path(folder) / "evaluation" / "test.parquet")
    return frame.filter((pl.col("probe") == AGENT) & ~pl.col("failed"))


def question_scores(folder: Path, column: str = "em") -> dict[str, float]:
    """Question id -> score, the mean over a question's attempts; rows without a score are left out, and a column that
    the file does not have gives none."""
    frame = question_frame(folder)
    if column not in frame.columns:
        return {}
    means = frame.drop_nulls(column).group_by("id").agg(pl.col(column).mean()).sort("id")
    return dict(zip(means["id"], means[column], strict=True))


def question_sums(folder: Path, columns: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Question id -> sums of several columns over the question's attempts that have them all; empty if the file lacks
    one of them."""
    frame = question_frame(folder)
    if not set(columns) <= set(frame.columns):
        return {}
    sums = frame.drop_nulls(list(columns)).group_by("id").agg(pl.col(list(columns)).sum()).sort("id")
    return {row[0]: tuple(float(value) for value in row[1:]) for row in sums.select("id", *columns).iter_rows()}


def scores_by_seed(runs: Sequence[Run], column: str = "em", *, sampled: bool = False) -> list[dict[str, float]]:
    """Of every run (seed) of one method its questions' scores; empty if ``sampled`` and a run was not tested at
    temperature 1."""
    folders = [run.sampled if sampled else run.folder for run in runs]
    return [] if None in folders else [question_scores(folder, column) for folder in folders if folder is not None]


def table_of(scores: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Scores [seeds, questions] of the questions that every seed answered."""
    common = _common(scores)
    return np.array([[seed[q] for q in common] for seed in scores])


def paired(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], *, same_seeds: bool
) -> PairedDifference | None:
    """Bootstrap of a minus b (``scores_by_seed``) over seeds and the questions that all of them answered; None without
    such a question. With one seed each it is over questions alone."""
    if not (a and b):
        return None
    table = table_of([*a, *b])
    return paired_bootstrap(table[: len(a)], table[len(a) :], same_seeds=same_seeds) if table.size else None


def _common(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(set.intersection(*(set(s) for s in scores)))


def pooled_cell(runs: Sequence[Run], column: Column) -> dict[str, Any] | None:
    """A column's value over the runs (seeds) of one method: computed anew, with an interval over seeds and the
    questions that all have where the rows tell it (metrics over several attempts: over questions alone); else a single
    run's own, or the mean of the runs' means; None unless every run has it."""
    if len(column.rows) == 1:
        table = table_of(scores_by_seed(runs, column.rows[0]))
        if table.size:
            return bootstrap_seeds([table]).as_json()
    if len(column.rows) == 2:
        sums = [question_sums(run.folder, column.rows) for run in runs]
        common = _common(sums)
        tables = [np.array([[s[q][i] for q in common] for s in sums]) for i in (0, 1)]
        if tables[1].sum():
            return bootstrap_seeds(tables, lambda m: column.per * m[0] / m[1]).as_json()
    values = [column.value(read_evaluation(run.folder)["test"], read_training(run.folder)) for run in runs]
    if len(values) == 1:
        return values[0] if values[0] is not None and values[0]["n"] else None
    if column.key.startswith(OVER_ATTEMPTS) and all(values):
        return _over_attempts(runs, column.key) or mean_metric(values)
    return mean_metric(values)


def _over_attempts(runs: Sequence[Run], key: str) -> dict[str, Any] | None:
    """A metric of ``sampling_metrics`` over runs that all have it; None if the rows of one cannot tell it."""
    frames = [question_frame(run.folder) for run in runs]
    if any(not set(FIELDS) <= set(frame.columns) for frame in frames):
        return None
    pooled = pooled_metric(key, [questions_of(frame.select(FIELDS).iter_rows()) for frame in frames])
    return pooled.as_json() if pooled.n else None


def mean_metric(values: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Mean over seeds of the means, without an interval; None unless every seed has it."""
    present = [f for f in values if f is not None and f["n"]]
    if len(present) < len(values):
        return None
    return {"mean": float(np.mean([f["mean"] for f in present])), "n": sum(f["n"] for f in present)}


def results_json(runs: Sequence[Run], columns: Mapping[str, Column], score: str = "em") -> list[dict[str, Any]]:
    """One object per method and seed.

    The ``score`` (of ``experiments.registry.columns``, named under ``metric``) of the test as n (questions), attempts
    (at each question), trials (all attempts that were scored), k (right ones among them), mean (k / trials, unless a
    question has fewer attempts than the others), low, high, null where it was not measured; under ``sampled`` the same
    at temperature 1; under ``f1`` and ``searches`` means; under ``metrics`` mean, low, high and n of every chosen
    column that was measured (of the training one number: no interval, n is 1); then
    seconds, command, commit.
    """
    objects = []
    for run in runs:
        test, training = read_evaluation(run.folder)["test"], read_training(run.folder)
        metrics = {name: column.value(test, training) for name, column in columns.items()}
        objects.append(
            {
                "method": run.method,
                "seed": run.seed,
                "metric": score,
                **score_metrics(run.folder, SCORES[score]),
                "sampled": score_metrics(run.sampled, SCORES[score]) if run.sampled else None,
                "f1": test["f1"]["mean"],
                "searches": test["searches"]["mean"],
                "metrics": {name: value for name, value in metrics.items() if value is not None and value["n"]},
                "seconds": run.seconds,
                "command": run.command,
                "commit": run.commit,
            }
        )
    return objects


def score_metrics(folder: Path, score: Score) -> dict[str, Any]:
    metric, frame = read_evaluation(folder)["test"].get(score.column), question_frame(folder)
    attempts = frame.group_by("id").len()["len"].max() or 0
    if metric is None:  # tested before there was such a metric
        return {"n": 0, "attempts": attempts, "trials": 0, "k": None, "mean": None, "low": None, "high": None}
    scored = frame[score.rows].drop_nulls()
    counts = {"n": metric["n"], "attempts": attempts, "trials": len(scored), "k": round(scored.sum())}
    return counts | {key: metric[key] for key in ("mean", "low", "high")}
