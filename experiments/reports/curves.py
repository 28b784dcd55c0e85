"""Curves of runs: for each method the mean over its seeds, in a band from the lowest to the highest seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which readers with colour blindness can distinguish; grey replaces yellow, which is too
# faint on white. The first method is black.
PALETTE = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#8C8C8C")
DPI = 110
MANY_POINTS = 30  # longer curves are smoothed


def curves_figure(history: pl.DataFrame, metrics: Sequence[str], methods: Iterable[str]) -> Figure:
    """Draw a figure with a panel for each metric that was logged at several steps, and one line per method.

    Args:
        history: as ``compare.history_frame`` makes it; ``run`` is the method.
        metrics: in the order of the panels.
        methods: in the order of the legend.

    Raises:
        ValueError: no metric has a point.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = {metric: history.filter(pl.col("metric") == metric)["step"].n_unique() for metric in metrics}
    shown = [m for m in metrics if steps[m] > 1] or [m for m in metrics if steps[m]]
    if not shown:
        present = history["metric"].unique().sort().to_list()
        raise ValueError(f"no points for any of {list(metrics)}; these have some: {present}")
    across = min(2, len(shown))
    rows = -(-len(shown) // across)
    figure = Figure(figsize=(4.5 * across + 1, 2.3 * rows + 0.7), layout="constrained", facecolor="white")
    lines = {}
    for metric, axis in zip(shown, figure.subplots(rows, across, squeeze=False).ravel(), strict=False):
        for number, method in enumerate(methods):
            seeds = history.filter((pl.col("metric") == metric) & (pl.col("run") == method))
            if seeds.is_empty():
                continue
            window = MANY_POINTS // 3 if seeds["step"].n_unique() >= MANY_POINTS else 1
            value = pl.col("value").rolling_mean(window, min_samples=1, center=True).over("run_id", order_by="step")
            points = seeds.with_columns(value).group_by("step").agg(
                pl.col("value").mean(), low=pl.col("value").min(), high=pl.col("value").max()
            ).sort("step")  # fmt: skip
            look = {"color": PALETTE[number % len(PALETTE)], "linestyle": ("-", "--", ":")[number // len(PALETTE) % 3]}
            (lines[method],) = axis.plot(points["step"], points["value"], lw=1.6, label=method, **look)
            axis.fill_between(points["step"], points["low"], points["high"], color=look["color"], alpha=0.15, lw=0)
        axis.set_xlabel("iteration", fontsize=9)
        axis.set_ylabel(metric, fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in figure.axes[len(shown) :]:
        axis.set_visible(False)
    figure.legend(handles=[*lines.values()], loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure
