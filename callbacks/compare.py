"""Runs beside each other: one table from MLflow, and one HTML page with curves that needs nothing else."""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from callbacks.records import SQLITE, default_tracking_uri
from rollout.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient

CURVES = (
    "val/em", "test/em", "train/em", "train/reward", "train/loss", "train/kl", "train/kl_teacher", "train/entropy",
    "train/response_tokens", "train/grad_norm", "train/logprob_gap", "throughput/tokens_per_s",
)  # fmt: skip
HISTORY_SCHEMA = {"run_id": pl.String, "run": pl.String, "metric": pl.String, "step": pl.Int64, "value": pl.Float64}
MANY_POINTS = 30  # from here on a curve is smoothed
MAX_SIDE_BY_SIDE = 5  # runs whose parameters fit beside each other in a terminal


class NoRunsError(LookupError):
    """The store holds no run that fits the filters."""


def open_store(tracking_uri: str) -> MlflowClient:
    """Raises FileNotFoundError for an SQLite store that does not exist (MLflow would create an empty one)."""
    path = Path(tracking_uri.removeprefix(SQLITE))
    if tracking_uri.startswith(SQLITE) and not path.exists():
        raise FileNotFoundError(f"no MLflow store at {path}; train something first (make train), or give another URI")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def runs_frame(client: MlflowClient, experiment: str, names: Sequence[str] = ()) -> pl.DataFrame:
    """One row per run, oldest first: run_id, run, status, start_ms, seconds, ``params.*`` (strings), ``metrics.*``
    (last values).

    Args:
        names: experiments or shell patterns: "dgpo_tiny" keeps "dgpo_tiny" and "dgpo_tiny-seed0", not "dgpo_tiny_x";
            "dgpo*" keeps all of them. Empty: all runs.

    Raises:
        NoRunsError: no such experiment, or no run fits; says which names exist.
    """
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = ", ".join(sorted(e.name for e in client.search_experiments())) or "none"
        raise NoRunsError(f"no MLflow experiment '{experiment}'; there are: {known}")
    rows, token = [], None
    while True:
        page = client.search_runs(
            [found.experiment_id], max_results=1000, page_token=token, order_by=["attributes.start_time ASC"]
        )
        rows += [_row(run) for run in page]
        token = page.token
        if not token:
            break
    patterns = [p for name in names for p in (name, f"{name}-*", f"{name} *")] or ["*"]
    kept = [row for row in rows if any(fnmatch.fnmatch(row["run"], pattern) for pattern in patterns)]
    if not kept:
        known = ", ".join(sorted({row["run"] for row in rows})) or "none"
        raise NoRunsError(f"no run fits {list(names)} in experiment '{experiment}'; there are: {known}")
    return pl.from_dicts(kept, infer_schema_length=None)  # all rows: a column may appear late


def _row(run: Any) -> dict[str, Any]:
    end = run.info.end_time
    return {
        "run_id": run.info.run_id,
        "run": run.info.run_name,
        "status": run.info.status,
        "start_ms": run.info.start_time,
        "seconds": (end - run.info.start_time) / 1000 if end else None,
        **{f"params.{k}": v for k, v in run.data.params.items()},
        **{f"metrics.{k}": v for k, v in run.data.metrics.items()},
    }


def history_frame(client: MlflowClient, runs: Mapping[str, str], metrics: Sequence[str]) -> pl.DataFrame:
    """Long table of ``run_id, run, metric, step, value``. A step logged twice (an iteration repeated after a kill)
    counts once, with its last value.

    Args:
        runs: run id -> name.
    """
    rows = [
        {"run_id": run_id, "run": name, "metric": metric, "step": m.step, "value": m.value, "at": m.timestamp}
        for run_id, name in runs.items()
        for metric in metrics
        for m in client.get_metric_history(run_id, metric)
    ]
    frame = pl.DataFrame(rows, schema=HISTORY_SCHEMA | {"at": pl.Int64}).sort("at", maintain_order=True)
    last = frame.unique(["run_id", "metric", "step"], keep="last", maintain_order=True)
    return last.select(list(HISTORY_SCHEMA)).sort("run", "run_id", "metric", "step", maintain_order=True)


def differing_params(frame: pl.DataFrame) -> list[str]:
    """Parameter columns in which the runs are not all alike."""
    return [c for c in frame.columns if c.startswith("params.") and frame[c].n_unique() > 1]


def curves_figure(history: pl.DataFrame, metrics: Sequence[str] | None = None, columns: int = 2) -> Figure:
    """One panel a metric, one line a run. Metrics without a single point have no panel.

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.figure import Figure

    present = history["metric"].unique().to_list()
    shown = [m for m in (metrics or sorted(present)) if m in present]
    if not shown:
        raise ValueError(f"no points for any of {list(metrics or [])}; these have some: {sorted(present)}")
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    runs = history["run_id"].unique(maintain_order=True).to_list()  # two runs may have one name
    lines: dict[str, Any] = {}  # run -> one line of it, for the legend
    for axis, metric in zip(axes, shown, strict=False):
        of_metric = history.filter(pl.col("metric") == metric)
        for (run_id, run), points in of_metric.group_by(["run_id", "run"], maintain_order=True):
            place = runs.index(run_id)
            style = {"color": f"C{place % 10}", "linestyle": ("-", "--", ":")[place // 10 % 3]}
            values = points["value"]
            if len(points) >= MANY_POINTS:  # a line through a mean of neighbours, and faintly what it is the mean of
                axis.plot(points["step"], values, lw=0.6, alpha=0.2, color=style["color"])
                values = values.rolling_mean(MANY_POINTS // 3, min_samples=1, center=True)
            marker = "o" if len(points) < MANY_POINTS else None
            (lines[run_id],) = axis.plot(points["step"], values, marker=marker, ms=3, lw=1.4, label=run, **style)
        axis.set_title(metric, fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=4, fontsize=8)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an inline <svg> element: text stays text, and the same figure gives the same characters."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compact_agents"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def compare(
    outputs: Path,
    names: Sequence[str] = (),
    *,
    tracking_uri: str | None = None,
    experiment: str = "compact_agents",
    metrics: Sequence[str] = CURVES,
) -> str:
    """Write ``<outputs>/compare.html`` (table and curves of the runs) and return the table as text for a terminal.

    Args:
        outputs: folder with the embedded store, and for the page.
        names: see ``runs_frame``.
        tracking_uri: default: ``MLFLOW_TRACKING_URI``, else the SQLite file in ``outputs``.

    Raises:
        FileNotFoundError: no store. NoRunsError: nothing fits.
    """
    client = open_store(tracking_uri or default_tracking_uri(Path(outputs)))
    frame = runs_frame(client, experiment, names)
    figures, params = comparison(frame, metrics)
    history = history_frame(client, dict(zip(frame["run_id"], _labels(frame), strict=True)), metrics)
    drawing = svg(curves_figure(history, metrics)) if len(history) else ""
    page = Path(outputs) / "compare.html"
    write_atomically(page, _page(experiment, pl.concat([figures, params], how="horizontal"), drawing))
    return f"{_text(figures, params)}curves: {page}"


def _labels(frame: pl.DataFrame) -> list[str]:
    """Run names; several runs of one name get the start of their id."""
    names = frame["run"].to_list()
    pairs = zip(names, frame["run_id"], strict=True)
    return [f"{name} {run_id[:6]}" if names.count(name) > 1 else name for name, run_id in pairs]


def comparison(frame: pl.DataFrame, metrics: Sequence[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Columns worth reading: name, status, seconds and the last value of each metric; the parameters that differ."""
    measured = {f"metrics.{m}": m for m in metrics if f"metrics.{m}" in frame.columns}
    params = {c: c.removeprefix("params.") for c in differing_params(frame)}
    figures = frame.with_columns(run=pl.Series(_labels(frame))).select("run", "status", "seconds", *measured)
    return figures.rename(measured), frame.select(*params).rename(params)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(figures: pl.DataFrame, params: pl.DataFrame) -> str:
    """Runs go down or across, whichever is fewer; parameters with a run per column, for as many as fit side by side."""
    if len(figures) < figures.width:
        shown = _table("runs", ("", *figures["run"]), _turned(figures.drop("run")))
    else:
        shown = _table("runs", figures.columns, figures.iter_rows())
    if not params.width or len(figures) > MAX_SIDE_BY_SIDE:
        return shown + ("the parameters that differ are on the page\n" if params.width else "")
    return shown + _table("parameters that differ", ("", *figures["run"]), _turned(params))


def _turned(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    return [(name, *frame[name]) for name in frame.columns]


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=not name)  # nameless: the names of what stands beside
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    return table_text(table)


def table_text(table: Any) -> str:
    """A rich table as text: coloured and folded for a terminal, wide and plain for a pipe or a log file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _page(title: str, table: pl.DataFrame, drawing: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(v))}</td>" for v in row) + "</tr>" for row in table.iter_rows()
    )
    curves = f"<figure>{drawing}</figure>" if drawing else "<p>These runs logged none of the metrics.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}: runs compared</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}: {len(table)} runs</h1>\n<div class=\"wide\"><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>\n{curves}\n</body></html>\n"
    )


STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;padding:1rem;max-width:80rem;font:16px/1.5 system-ui,sans-serif}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #8886;vertical-align:top}
figure{margin:1rem 0;padding:.5rem;background:#fff;border-radius:6px}figure svg{max-width:100%;height:auto}
"""
