"""Reads the metrics of runs from their folders: a table of their last values, and their history."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from callbacks.tracking.metrics_file import METRICS_FILE, read_metrics
from experiments.stages.store import StageFolder
from experiments.stages.tested_on import differing, tested_on

PIPED = 100_000  # columns, so that a table in a pipe is never cut
CURVES = (
    "val/em", "test/em", "train/em", "train/reward", "train/loss", "train/kl", "train/entropy",
    "train/response_tokens", "train/grad_norm", "train/logprob_gap", "throughput/tokens_per_s",
)  # fmt: skip
HISTORY_SCHEMA = {"run_id": pl.String, "run": pl.String, "metric": pl.String, "step": pl.Int64, "value": pl.Float64}


class NoRunsError(LookupError):
    """Raised if no recorded run fits the given names."""


def find_runs(outputs: Path, names: Sequence[str] = ()) -> list[tuple[str, Path]]:
    """Return the names and folders of the runs that have logged metrics, oldest first.

    Args:
        names: experiments or shell patterns: "dgpo_tiny" keeps "dgpo_tiny-seed0", not "dgpo_tiny_x"; "dgpo*" keeps
            both. Empty: all runs.

    Raises:
        NoRunsError: no run, or a name that no run fits.
    """
    files = sorted(outputs.glob(f"*/*/{METRICS_FILE}"), key=lambda file: file.stat().st_mtime)
    runs = [(_name(file.parent), file.parent) for file in files]
    kept = [run for run in runs if not names or any(_fits(run[0], name) for name in names)]
    if (lost := [name for name in names if not any(_fits(run, name) for run, _ in runs)]) or not kept:
        known = ", ".join(sorted({name for name, _ in runs})) or "none; train an experiment first (make train)"
        raise NoRunsError(f"no run fits {lost} in {outputs}; the runs are: {known}")
    return kept


def _name(folder: Path) -> str:
    path = StageFolder(folder).config_path
    config = yaml.safe_load(path.read_text()) if path.is_file() else {}
    logger = (config.get("trainer") or {}).get("logger")
    named = (logger.get("init_args") or {}).get("run_name") if isinstance(logger, dict) else None
    return named or folder.parent.name


def _fits(run: str, name: str) -> bool:
    return any(fnmatch.fnmatch(run, pattern) for pattern in (name, f"{name}-*"))


def history_frame(runs: Mapping[Path, str], metrics: Sequence[str]) -> pl.DataFrame:
    """Return the logged metrics of runs as a long table: ``run_id`` (the folder), ``run, metric, step, value``. A step
    logged twice, because an iteration was repeated after a kill, counts once, with its last value.

    Args:
        runs: folder -> name.
    """
    rows = [
        (str(folder), name, metric, row.step, row.metrics[metric])
        for folder, name in runs.items()
        if (folder / METRICS_FILE).is_file()
        for row in read_metrics(folder / METRICS_FILE)
        for metric in metrics
        if metric in row.metrics
    ]
    frame = pl.DataFrame(rows, schema=HISTORY_SCHEMA, orient="row")
    last = frame.unique(["run_id", "metric", "step"], keep="last", maintain_order=True)
    return last.sort("run", "run_id", "metric", "step", maintain_order=True)


def compare(outputs: Path, names: Sequence[str] = (), *, metrics: Sequence[str] = CURVES) -> str:
    """Return a table of runs as text: status, seconds, and the last value of each metric. A last line names the test
    sets if they differ. Runs of one name have the key of their folder behind it.

    Args:
        names: see ``find_runs``.

    Raises:
        NoRunsError: no run fits.
    """
    from rich.table import Table

    runs, table = find_runs(outputs, names), Table(title="runs")
    often = Counter(name for name, _ in runs)  # of other settings, or checkpoints
    runs = [(f"{name} {folder.name}" if often[name] > 1 else name, folder) for name, folder in runs]
    table.add_column("", overflow="fold", no_wrap=True)
    last: list[dict[str, float]] = []
    for name, folder in runs:
        table.add_column(name, overflow="fold")
        last.append(
            {metric: value for row in read_metrics(folder / METRICS_FILE) for metric, value in row.metrics.items()}
        )
    stages = [StageFolder(folder) for _, folder in runs]
    table.add_row("status", *(stage.state() for stage in stages))
    table.add_row("seconds", *(_cell((stage.result() or {}).get("seconds")) for stage in stages))
    for metric in metrics:
        if any(metric in values for values in last):
            table.add_row(metric, *(_cell(values.get(metric)) for values in last))
    said = differing((name, tested_on(folder)) for name, folder in runs)
    return table_text(table) + (f"{said}\n" if said else "")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def table_text(table: Any) -> str:
    """Render a rich table as text: coloured and folded for a terminal, plain and unfolded for a pipe or a file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
