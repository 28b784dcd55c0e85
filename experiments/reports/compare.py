"""Reads runs recorded in MLflow: a table of their last values, and their history."""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from callbacks.tracking.mlflow_names import mlflow_name
from callbacks.tracking.run_info import SQLITE, default_tracking_uri
from experiments.reports.tested_on import SHOWN, differing

if TYPE_CHECKING:
    from mlflow import MlflowClient

PIPED = 100_000  # columns, so that a table in a pipe is never cut
CURVES = (
    "val/em", "test/em", "train/em", "train/reward", "train/loss", "train/kl", "train/entropy",
    "train/response_tokens", "train/grad_norm", "train/logprob_gap", "throughput/tokens_per_s",
)  # fmt: skip
HISTORY_SCHEMA = {"run_id": pl.String, "run": pl.String, "metric": pl.String, "step": pl.Int64, "value": pl.Float64}


class NoRunsError(LookupError):
    """No run in the store fits the filters."""


def open_store(tracking_uri: str) -> MlflowClient:
    """Raises FileNotFoundError for an SQLite store that does not exist (MLflow would create an empty one)."""
    path = Path(tracking_uri.removeprefix(SQLITE))
    if tracking_uri.startswith(SQLITE) and not path.exists():
        raise FileNotFoundError(
            f"no MLflow store at {path}; train an experiment first (make train), or import runs (make metrics)"
        )
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def runs_frame(client: MlflowClient, experiment: str | None = None, names: Sequence[str] = ()) -> pl.DataFrame:
    """Return one row per run, oldest first: run_id, run, status, test set, seconds, ``metrics.*`` (last values).

    Args:
        experiment: MLflow experiment, or None for all.
        names: experiments or shell patterns: "dgpo_tiny" keeps "dgpo_tiny" and "dgpo_tiny-seed0", not "dgpo_tiny_x";
            "dgpo*" keeps all three. Empty: all runs.

    Raises:
        NoRunsError: an unknown experiment, or a name that no run fits.
    """
    stored = {e.name: e.experiment_id for e in client.search_experiments()}
    if experiment is not None and experiment not in stored:
        raise NoRunsError(f"no MLflow experiment '{experiment}'; expected one of {sorted(stored)}")
    searched = list(stored.values()) if experiment is None else [stored[experiment]]
    found_runs = client.search_runs(searched, max_results=50_000, order_by=["attributes.start_time ASC"])
    rows = [_row(run) for run in found_runs]
    kept = [row for row in rows if not names or any(_fits(row["run"], name) for name in names)]
    if (lost := [name for name in names if not any(_fits(row["run"], name) for row in rows)]) or not kept:
        known = ", ".join(sorted({row["run"] for row in rows})) or "none"
        where = f" in experiment '{experiment}'" if experiment is not None else ""
        raise NoRunsError(f"no run fits {lost}{where}; the runs are: {known}")
    return pl.from_dicts(kept, infer_schema_length=None)  # all rows: a column may appear late


def _fits(run: str, name: str) -> bool:
    return any(fnmatch.fnmatch(run, pattern) for pattern in (name, f"{name}-*", f"{name} *"))


def _row(run: Any) -> dict[str, Any]:
    end = run.info.end_time
    return {
        "run_id": run.info.run_id,
        "run": run.info.run_name,
        "status": run.info.status,
        "test set": _tested_on(run),
        "seconds": (end - run.info.start_time) / 1000 if end else None,
        **{f"metrics.{k}": _stored(v) for k, v in run.data.metrics.items()},
    }


def _tested_on(run: Any) -> str | None:
    """Return names and digests of the data sets that a run was tested on (``experiments.stages.inputs``)."""
    used = run.inputs.dataset_inputs if run.inputs else ()
    tests = [each.dataset for each in used if any(tag.value == "testing" for tag in each.tags)]
    return ", ".join(sorted(f"{dataset.name} ({dataset.digest[:SHOWN]})" for dataset in tests)) or None


def _stored(value: float) -> float:
    """Restore an infinite value, which MLflow's databases store as the largest finite number."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def history_frame(client: MlflowClient, runs: Mapping[str, str], metrics: Sequence[str]) -> pl.DataFrame:
    """Return a long table of ``run_id, run, metric, step, value``. A step logged twice, because an iteration was
    repeated after a kill, counts once, with its last value.

    Args:
        runs: run id -> name.
    """
    rows = [
        {"run_id": run_id, "run": name, "metric": metric, "step": m.step, "value": _stored(m.value), "at": m.timestamp}
        for run_id, name in runs.items()
        for metric in metrics
        for m in client.get_metric_history(run_id, mlflow_name(metric))
    ]
    frame = pl.DataFrame(rows, schema=HISTORY_SCHEMA | {"at": pl.Int64}).sort("at", maintain_order=True)
    last = frame.unique(["run_id", "metric", "step"], keep="last", maintain_order=True)
    return last.select(list(HISTORY_SCHEMA)).sort("run", "run_id", "metric", "step", maintain_order=True)


def compare(
    outputs: Path,
    names: Sequence[str] = (),
    *,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    metrics: Sequence[str] = CURVES,
) -> str:
    """Format a table of runs: status, seconds, and the last value of each metric that a run has. A last line names the
    test sets if they differ.

    Args:
        outputs: folder with the embedded store.
        names, experiment: see ``runs_frame``.
        tracking_uri: default: ``MLFLOW_TRACKING_URI``, else the SQLite file in ``outputs``.

    Raises:
        FileNotFoundError: no store. NoRunsError: no run fits.
    """
    from rich.table import Table

    frame = runs_frame(open_store(tracking_uri or default_tracking_uri(Path(outputs))), experiment, names)
    measured = {c: m for m in metrics if (c := f"metrics.{mlflow_name(m)}") in frame.columns}
    rows = frame.select("run", "status", "seconds", *measured).rename(measured)
    table = Table(title="runs")
    for name in ("", *rows["run"]):
        table.add_column(name, overflow="fold", no_wrap=not name)
    for name in rows.columns[1:]:
        table.add_row(name, *(_cell(value) for value in rows[name]))
    said = differing(zip(rows["run"], frame["test set"], strict=True))
    return table_text(table) + (f"{said}\n" if said else "")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table_text(table: Any) -> str:
    """Render a rich table: coloured and folded for a terminal, plain and unfolded for a pipe or a file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
