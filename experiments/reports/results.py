"""Reads finished stages into the objects of a results file and pools their scores over seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from callbacks.evaluation.attempts import FIELDS, OF_SETS, metric_values, questions_of
from callbacks.evaluation.statistics import (
    PairedDifference,
    bootstrap_interval,
    bootstrap_seeds,
    bootstrap_strata,
    paired_bootstrap,
)
from callbacks.evaluation_rows import AGENT
from callbacks.tracking.run_info import TRAINING_FILE
from experiments.registry.columns import COLUMNS, OVER_ATTEMPTS, SCORES, Column, Score
from experiments.reports.question_values import common_tables, packed
from experiments.stages.tested_on import tested_on


@dataclass(frozen=True, slots=True)
class Run:
    """A finished stage (one method and seed) on a results page."""

    experiment: str
    method: str  # its name in tables
    seed: int
    folder: Path
    seconds: float
    command: str
    commit: str
    fixed_seed: bool = False  # one stage for all seeds of the methods that it is compared with
    group: str | None = None  # end of the method's name; methods are compared within their group


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Return the content of a tested stage's ``evaluation.json``.

    Raises:
        FileNotFoundError: no such file. ValueError: it contains no test.
    """
    path = folder / "evaluation.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected the evaluation of a stage that was tested")
    content = json.loads(path.read_text())
    if "test" not in content:
        raise ValueError(f"{path} contains {sorted(content)}, expected 'test'; run the stage to its end")
    return content


def read_training(folder: Path) -> dict[str, Any] | None:
    """Return the content of a stage's ``training.json``, or None for stages without rollouts and for older runs."""
    path = folder / TRAINING_FILE
    return json.loads(path.read_text()) if path.exists() else None


def question_frame(folder: Path) -> pl.DataFrame:
    """Return the rows of a stage's test as a table, without diagnostic prompts and infrastructure failures. Older files
    lack some columns."""
    frame = pl.read_parquet(folder / "evaluation" / "test.parquet")
    return frame.filter((pl.col("prompt_mode") == AGENT) & ~pl.col("failed"))


def measures(folder: Path, column: Column) -> list[dict[str, float]]:
    """Return one run's numbers by question id, from which a results column is pooled over several runs. They are means,
    the two sums of a ratio, or a metric of several attempts (for ``average_of_sets`` with each question's set). Returns
    [] without them."""
    frame, rows = question_frame(folder), column.rows
    if rows and set(rows) <= set(frame.columns):
        chosen = pl.col(rows).mean() if len(rows) == 1 else pl.col(rows).sum()
        values = frame.drop_nulls(rows).group_by("id").agg(chosen.cast(pl.Float64))
        found = [dict(values.select("id", name).iter_rows()) for name in rows]
    elif column.key.startswith(OVER_ATTEMPTS) and set(FIELDS) <= set(frame.columns):
        questions = questions_of(frame.select(FIELDS).iter_rows())
        sets = sorted({question.data_source for question in questions})
        found = [metric_values(column.key, questions)]
        if column.key.startswith(f"{OF_SETS}/"):
            found.append({question.id: float(sets.index(question.data_source)) for question in questions})
    else:
        found = []
    return found if found and found[0] else []


def paired(a: Sequence[Sequence[str]], b: Sequence[Sequence[str]], *, same_seeds: bool) -> PairedDifference | None:
    """Return the bootstrapped difference a - b between the scores of two methods (``score_values``). Resamples seeds
    and the questions that all answered; questions alone for one seed each. Returns None without a common question."""
    tables = common_tables([*a, *b]) if a and b else []
    if not (tables and tables[0].size):
        return None
    return paired_bootstrap(tables[0][: len(a)], tables[0][len(a) :], same_seeds=same_seeds)


def score_values(objects: Sequence[Mapping[str, Any]], score: Score) -> list[list[str]]:
    """Return the scores of each run's questions as ``packed`` texts."""
    return [o["questions"].get(score.column, []) for o in objects]


def pooled_cell(objects: Sequence[Mapping[str, Any]], name: str, column: Column) -> dict[str, Any] | None:
    """Return a table cell: one results column pooled over the runs (seeds) of a method, from their ``results_json``.

    With values by question the interval is over seeds and common questions, or over questions alone for metrics of
    several attempts. Otherwise returns a single run's value, or the mean of the runs' values. Returns None unless every
    run has the column.
    """
    values, over_attempts = [o["metrics"].get(name) for o in objects], column.key.startswith(OVER_ATTEMPTS)
    if len(values) == 1 and over_attempts:
        return values[0]
    tables = common_tables([o["questions"].get(name, []) for o in objects])
    if tables and tables[0].size and (all(values) or not over_attempts):
        if over_attempts:
            return _over_attempts(tables)
        if len(tables) == 1:
            return bootstrap_seeds(tables).as_json()
        if tables[1].sum():
            return bootstrap_seeds(tables, lambda m: column.per * m[0] / m[1]).as_json()
    return values[0] if len(values) == 1 else mean_metric(values)


def _over_attempts(tables: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the bootstrapped mean and interval of a metric of several attempts, from each question's mean over runs,
    within each set of questions."""
    means = tables[0].mean(axis=0)
    if len(tables) == 1:
        return bootstrap_interval(means).as_json()
    sets = tables[1][0]
    return bootstrap_strata([means[sets == number] for number in np.unique(sets)]).as_json()


def mean_metric(values: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the mean of the seeds' means, without an interval, or None unless every seed has one."""
    present = [f for f in values if f is not None and f["n"]]
    if len(present) < len(values):
        return None
    return {"mean": float(np.mean([f["mean"] for f in present])), "n": sum(f["n"] for f in present)}


def results_json(runs: Sequence[Run], columns: Mapping[str, Column], score: str = "em") -> list[dict[str, Any]]:
    """Return the data of a results page: one object per method and seed.

    - ``metric``: name of the score; n questions, attempts per question, trials (scored attempts), k correct ones, mean
      (k / trials if all questions have as many attempts), low, high; null if not measured
    - ``sources``: the score by data source; ``f1``, ``searches``: means
    - ``metrics``: mean, low, high and n of every measured column (training metrics: one number, n is 1)
    - ``questions``: ``measures`` of score and columns, each a ``question_values.packed`` text over the questions of all
      runs, sorted by id
    - ``test_set`` (``tested_on``), ``seconds``, ``command``, ``commit``
    """
    column, objects = COLUMNS[SCORES[score].column], []
    ids = sorted({question for run in runs for question in question_frame(run.folder)["id"]})

    def texts(folder: Path, column: Column) -> list[str]:
        return [packed([values.get(question) for question in ids]) for values in measures(folder, column)]

    for run in runs:
        test, training = read_evaluation(run.folder)["test"], read_training(run.folder)
        metrics = {name: chosen.value(test, training) for name, chosen in columns.items()}
        kept = {name: texts(run.folder, one) for name, one in {**columns, SCORES[score].column: column}.items()}
        prefix = f"{SCORES[score].column}/"
        objects.append(
            {
                "method": run.method,
                "seed": run.seed,
                "group": run.group,
                "fixed_seed": run.fixed_seed,
                "metric": score,
                **score_metrics(run.folder, SCORES[score]),
                "sources": {key.removeprefix(prefix): test[key] for key in test if key.startswith(prefix)},
                "f1": test["f1"]["mean"],
                "searches": test["searches"]["mean"],
                "metrics": {name: value for name, value in metrics.items() if value is not None and value["n"]},
                "questions": {name: found for name, found in kept.items() if found},
                "test_set": tested_on(run.folder),
                "seconds": run.seconds,
                "command": run.command,
                "commit": run.commit,
            }
        )
    return objects


def score_metrics(folder: Path, score: Score) -> dict[str, Any]:
    metric, frame = read_evaluation(folder)["test"].get(score.column), question_frame(folder)
    attempts = frame.group_by("id").len()["len"].max() or 0
    if metric is None:  # an older test
        return {"n": 0, "attempts": attempts, "trials": 0, "k": None, "mean": None, "low": None, "high": None}
    scored = frame[score.rows].drop_nulls()
    counts = {"n": metric["n"], "attempts": attempts, "trials": len(scored), "k": round(scored.sum())}
    return counts | {key: metric[key] for key in ("mean", "low", "high")}
