"""Curves of runs: per method the mean over its seeds and a band, in panels that a reader can take in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision, but for grey in place of yellow, too faint on white
FIRST = "#000000"
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#8C8C8C")
DPI = 110  # with the sizes below, some 1000 pixels wide: text stays readable on a page of 800
MANY_POINTS = 30  # from here on a curve is smoothed
FEW_POINTS = 6  # up to here its points are marked
TOGETHER = 5  # lines in a panel at most
UNITS = {
    "em": "share", "acc": "share", "success": "share", "f1": "share", "tokens_per_s": "tokens per second",
    "kl": "nats", "entropy": "nats", "opd_log_ratio": "nats", "logprob_gap": "nats", "divergence": "nats",
    "response_tokens": "tokens", "tool_calls_per_trajectory": "calls",
}  # fmt: skip


def styles(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each method, for all pictures of a page; black is the first one's alone."""
    first, *others = dict.fromkeys(methods)
    return {first: {"color": FIRST, "linestyle": "-"}} | {
        method: {"color": PALETTE[k % len(PALETTE)], "linestyle": ("-", "--", ":")[k // len(PALETTE) % 3]}
        for k, method in enumerate(others)
    }


def curves_figure(
    history: pl.DataFrame,
    metrics: Sequence[str],
    looks: Mapping[str, dict[str, Any]],
    groups: Sequence[Sequence[str]] = (),
) -> Figure:
    """A panel a metric, with a line for each method: the mean over its runs, in a band from the lowest to the highest.
    Several ``groups`` have a column each; without, more than ``TOGETHER`` methods are shared out among columns, which
    all have the first. Metrics that were logged at a single step have no panel (their values are in tables), unless
    there are no others.

    Args:
        history: as ``compare.history_frame`` makes it; ``run`` is the method.
        metrics: in the order of the panels.
        looks: ``styles`` of the methods, in their order; the first is the one that the others are compared with.
        groups: methods that are compared with each other alone.

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    steps = {metric: history.filter(pl.col("metric") == metric)["step"].n_unique() for metric in metrics}
    shown = [m for m in metrics if steps[m] > 1] or [m for m in metrics if steps[m]]
    if not shown:
        present = history["metric"].unique().sort().to_list()
        raise ValueError(f"no points for any of {list(metrics)}; these have some: {present}")
    named = set(history["run"])
    first, *others = [method for method in looks if method in named]
    columns = max(1, -(-len(others) // (TOGETHER - 1)))
    size = -(-len(others) // columns)
    shared = [[first, *others[i * size : (i + 1) * size]] for i in range(columns)]
    given = [[method for method in group if method in named] for group in groups]
    groups = [group for group in given if group] if len(groups) > 1 else shared
    columns = len(groups)
    if columns == 1:  # the metrics themselves stand side by side
        across = min(2, len(shown))
        panels = [(metric, groups[0]) for metric in shown]
    else:
        across = columns
        panels = [(metric, group) for metric in shown for group in groups]
    rows = -(-len(panels) // across)
    figure = Figure(figsize=(9.0 if across > 1 else 5.5, 2.3 * rows + 0.7), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, across, squeeze=False, sharey="row" if columns > 1 else False)
    for (metric, group), axis in zip(panels, axes.ravel(), strict=False):
        for method in group:
            _draw(axis, history.filter((pl.col("run") == method) & (pl.col("metric") == metric)), looks[method], method)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if axis.get_subplotspec().is_first_col() or columns == 1:
            axis.set_ylabel(_title(metric), fontsize=9)
    for number, axis in enumerate(axes.ravel()):
        axis.set_visible(number < len(panels))
        if number + across >= len(panels):  # the lowest of its column
            axis.set_xlabel("iteration", fontsize=9)
    for column, group in enumerate(groups):
        lines = [Line2D([], [], lw=1.6, label=method, **looks[method]) for method in group]
        where: Any = axes[0][column] if columns > 1 else figure
        above = (
            {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)} if columns > 1 else {"loc": "outside upper center"}
        )
        where.legend(handles=lines, ncols=1 if columns > 1 else 3, fontsize=8, frameon=False, **above)
    return figure


def _draw(axis: Any, points: pl.DataFrame, look: Mapping[str, Any], label: str) -> None:
    """One method of one metric; nothing if it has none of it."""
    seeds = []
    for _, seed in points.group_by("run_id", maintain_order=True):
        if len(seed) >= MANY_POINTS:
            smooth = pl.col("value").rolling_mean(MANY_POINTS // 3, min_samples=1, center=True)
            seed = seed.with_columns(smooth)
        seeds.append(seed)
    if not seeds:
        return
    value = pl.col("value")
    found = pl.concat(seeds).group_by("step").agg(value.mean(), low=value.min(), high=value.max()).sort("step")
    marker = "o" if len(found) <= FEW_POINTS else None
    axis.plot(found["step"], found["value"], lw=1.6, marker=marker, ms=4, label=label, **look)
    if len(seeds) > 1:
        axis.fill_between(found["step"], found["low"], found["high"], color=look["color"], alpha=0.15, lw=0)


def _title(metric: str) -> str:
    unit = next((UNITS[part] for part in metric.split("/") if part in UNITS), None)
    return f"{metric}\n({unit})" if unit else metric
