"""Results page, section "Gates": the share of sampled tokens that a self-teacher endorsed, over time and by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from callbacks.tracking.run_info import RUN_ID_FILE
from experiments.reports.compare import history_frame, open_store
from experiments.reports.curves import DPI
from experiments.reports.markdown import markdown_table
from experiments.reports.results import Run
from rollout.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS, TURNS = 3, 8  # as lightning_modules.maths.gates.gate_metrics logs them
ACTIVE, GAP = "train/gate_active", "train/gap"
BY_PART = tuple(f"part{k}" for k in range(1, PARTS + 1))  # of ACTIVE and of GAP
BY_TURN = (*(f"turn{k}" for k in range(1, TURNS + 1)), "later")
TAIL = 10  # iterations at either end of a training that a value is the mean of


def write_gates(
    runs: Sequence[Run], tracking_uri: str, picture: Path, looks: Mapping[str, Any]
) -> tuple[str, list[Path]]:
    """The section as Markdown, with its picture written; ("", []) if no run has logged gates.

    Args:
        runs: in the order of the page; seeds of a method are put together (mean over seeds, iteration by iteration).
        tracking_uri: MLflow store with their metrics.
        picture: the PNG to write; the section names it without its folder.
        looks: ``curves.styles`` of the methods.
    """
    of = gate_history(runs, tracking_uri)
    if not of:
        return "", []
    tells = {method: history for method, history in of.items() if discriminates(history)}
    if tells:
        with replacing(picture) as temporary:
            gates_figure(tells, looks).savefig(temporary, format="png", dpi=DPI)
    sections = [
        "\n## Gates\n",
        "The self-teacher is the student itself after a prompt with skills. Gap: mean log p_teacher - log p_student "
        "over the sampled tokens, in nats; endorsed: share of them with a gate above one half (for the gap gate: those "
        'that the teacher finds likelier), "-" where every gate is the same, as without a gate (1) or at beta 0 (one '
        f"half). Means over seeds and over the first and the last {TAIL} iterations; by third of a turn, and by number "
        "of the turn, over the last.\n",
        _ends_table(of),
        _places_table("endorsed", ACTIVE, tells),
        _places_table("gap", GAP, of),
        f"![share of endorsed tokens over training, by part of the turn, by turn]({picture.name})\n" if tells else "",
    ]
    return "\n".join(section for section in sections if section), [picture] if tells else []


def gate_history(runs: Sequence[Run], tracking_uri: str) -> dict[str, pl.DataFrame]:
    """Method -> a table of step, metric, value (mean over the method's seeds), for methods that have logged gates."""
    files = {run: run.folder / RUN_ID_FILE for run in runs}
    ids = {file.read_text().strip(): run.method for run, file in files.items() if file.exists()}
    if not ids:
        return {}
    metrics = [ACTIVE, GAP, *(f"{name}/{place}" for name in (ACTIVE, GAP) for place in (*BY_PART, *BY_TURN))]
    history = history_frame(open_store(tracking_uri), ids, metrics)
    found: dict[str, pl.DataFrame] = {}
    for method in dict.fromkeys(ids.values()):
        own = history.filter(pl.col("run") == method)
        if ACTIVE in own["metric"]:
            found[method] = own.group_by("step", "metric").agg(pl.col("value").mean()).sort("step")
    return found


def at_end(history: pl.DataFrame, metric: str, *, last: bool = True) -> float | None:
    """Mean of a metric over its first or last iterations; None where it was never logged."""
    values = history.filter(pl.col("metric") == metric).sort("step")["value"]
    kept = values.tail(TAIL) if last else values.head(TAIL)
    return None if kept.is_empty() else float(kept.mean())  # type: ignore[arg-type]


def discriminates(history: pl.DataFrame) -> bool:
    """Whether some gate was on the other side of one half than the rest; without a gate, or at beta 0, none ever is."""
    shares = history.filter(pl.col("metric") == ACTIVE)["value"]
    return bool(((shares > 0) & (shares < 1)).any())


def gates_figure(of: Mapping[str, pl.DataFrame], looks: Mapping[str, Any]) -> Figure:
    """Three panels of one scale, a line a method: the endorsed share over iterations, by third of a turn, by turn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 + 0.15 * (len(of) // 4)), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 3, sharey=True)
    for method, history in of.items():
        style: dict[str, Any] = {**looks[method], "label": method}
        curve = history.filter(pl.col("metric") == ACTIVE)
        axes[0].plot(curve["step"], curve["value"].rolling_mean(5, min_samples=1, center=True), lw=1.4, **style)
        for axis, names in ((axes[1], BY_PART), (axes[2], BY_TURN)):
            shares = [at_end(history, f"{ACTIVE}/{name}") for name in names]
            known = [(k, share) for k, share in enumerate(shares, 1) if share is not None]
            axis.plot([k for k, _ in known], [share for _, share in known], marker="o", ms=3, lw=1.4, **style)
    for axis, title in zip(axes, ("iteration", "third of the turn", "turn"), strict=True):
        axis.set_xlabel(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of tokens endorsed", fontsize=9)
    axes[1].set_xticks(range(1, PARTS + 1))
    axes[2].set_xticks(range(1, TURNS + 2), [*map(str, range(1, TURNS + 1)), "later"])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _ends_table(of: Mapping[str, pl.DataFrame]) -> str:
    rows = [
        [
            method,
            *(_text(at_end(history, GAP, last=last)) for last in (False, True)),
            *(_text(at_end(history, ACTIVE, last=last) if discriminates(history) else None) for last in (False, True)),
        ]
        for method, history in of.items()
    ]
    return markdown_table(["method", "gap, first", "gap, last", "endorsed, first", "endorsed, last"], rows)


def _places_table(title: str, metric: str, of: Mapping[str, pl.DataFrame]) -> str:
    """Empty where no method is to be shown."""
    titles = [*(f"part {k}" for k in range(1, PARTS + 1)), *(f"turn {k}" for k in range(1, TURNS + 1)), "later"]
    places = [f"{metric}/{place}" for place in (*BY_PART, *BY_TURN)]
    rows = [[method, *(_text(at_end(history, place)) for place in places)] for method, history in of.items()]
    return markdown_table([title, *titles], rows) if rows else ""


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
