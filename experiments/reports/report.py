"""Writes the closing table of ``make train`` and the results page of ``make reproduce``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from common.files import write_atomically
from experiments.registry.columns import columns_of, score_of
from experiments.reports.compare import history_frame, table_text
from experiments.reports.curves import DPI, curves_figure
from experiments.reports.results import Run, read_evaluation, read_training, results_json
from experiments.reports.results_page import metric_text, results_page
from experiments.stages.tested_on import differing, tested_on

RESULT_CURVES = (  # drawn besides those of the score, if a run has them
    "train/kl", "train/entropy", "train/tool_calls_per_trajectory", "train/opd_log_ratio",
    "train/divergence/last", "train/weight/last", "val/with_skills",
)  # fmt: skip


def closing_table(rows: Sequence[tuple[str, Path]], columns: Sequence[str] | None = None) -> str:
    """Return the results table as text, one line per tested stage: n and the chosen columns, scores with 95 % bootstrap
    intervals. A last line names the test sets if they differ.

    Args:
        rows: (label, stage folder), in the order to show.
        columns: names of ``experiments.registry.columns``, or None for the default ones.

    Raises:
        FileNotFoundError, ValueError: a stage without a test (see ``read_evaluation``), or an unknown column.
    """
    from rich.table import Table

    chosen, tested = columns_of(columns).values(), []
    table = Table(title="test set (scores with 95 % bootstrap interval; searches and calls: executed, per question)")
    table.add_column("")
    for name in ("n", *(column.title for column in chosen)):
        table.add_column(name, justify="right", overflow="fold")
    for label, folder in rows:
        test, training = read_evaluation(folder)["test"], read_training(folder)
        cells = [metric_text(column.value(test, training), column.interval) for column in chosen]
        table.add_row(label, str(test["em"]["n"]), *cells)
        tested.append((label, tested_on(folder)))
    return table_text(table) + (f"{said}\n" if (said := differing(tested)) else "")


def write_results(
    experiment: str,
    rows: Sequence[Mapping[str, Any]],
    out_dir: Path,
    command: str,
    *,
    columns: Sequence[str] | None = None,
    score: str | None = None,
    notes: str = "",
    gates: str = "",
) -> list[Path]:
    """Write the results page ``<experiment>.md``, its data ``<experiment>.json`` (``results_json``) and the curves.
    Returns their paths. Without logged metrics, there is no ``<experiment>_curves.png``.

    Args:
        experiment: the experiment that the others are compared with; also the name of the files.
        rows: the fields of finished stages' ``Run``; duplicates (a teacher shared by all seeds) count once.
        out_dir: normally docs/results.
        command: the command that writes the page.
        columns: names of ``experiments.registry.columns`` for the tables, or None for the default ones.
        score: key of ``experiments.registry.columns.SCORES`` that compares methods, or None for EM.
        notes, gates: Markdown, see ``results_page``.

    Raises:
        ValueError: no row of ``experiment``, or an unknown column or score.
    """
    chosen, main = columns_of(columns), score_of(score)
    runs = list({run.folder: run for run in (Run(**row) for row in rows)}.values())
    groups = list(dict.fromkeys(run.group for run in runs))
    runs.sort(key=lambda run: groups.index(run.group))
    mine = [run for run in runs if run.experiment == experiment]
    if not mine:
        raise ValueError(f"no row is a run of '{experiment}'; found {sorted({r.experiment for r in runs})}")
    curves = out_dir / f"{experiment}_curves.png"
    metrics = dict.fromkeys((*main.curves, *RESULT_CURVES, *(c.curve for c in chosen.values() if c.curve)))
    methods = list(dict.fromkeys(run.method for run in (mine[0], *runs)))
    history = _write_curves(curves, runs, tuple(metrics), methods)
    objects = results_json(runs, chosen, score or "em")
    data, page = out_dir / f"{experiment}.json", out_dir / f"{experiment}.md"
    write_atomically(data, json.dumps(objects, indent=2, allow_nan=False) + "\n")
    shown = {"notes": notes, "gates": gates, "curves": len(history) > 0}
    write_atomically(page, results_page(experiment, mine[0].method, objects, chosen, main, command, **shown))
    return [page, data, *([curves] if len(history) else [])]


def _write_curves(path: Path, runs: Sequence[Run], metrics: Sequence[str], methods: Sequence[str]) -> pl.DataFrame:
    """Draw the training curves of runs into a file, and return the drawn metrics as ``compare.history_frame``. The
    table is empty (and there is no file) if no run logged any of the metrics. ``metrics[0]`` is logged by reinforcement
    learning."""
    history = history_frame({run.folder: run.method for run in runs}, metrics)
    if not len(history):
        return history
    learning = history.filter(pl.col("metric") == metrics[0])["run_id"].unique()
    if len(learning):  # supervised learning counts other iterations
        history = history.filter(pl.col("run_id").is_in(learning.implode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    curves_figure(history, metrics, methods).savefig(path, dpi=DPI)
    return history
