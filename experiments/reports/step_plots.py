"""Curves of divergence, weight and teacher entropy over the steps, by kind of trajectory and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from callbacks.evaluation.step_kinds import NAMED, Kind
from callbacks.evaluation.step_rows import StepRow
from experiments.reports.curves import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {"divergence": "divergence d\n(nats)", "weight": "weight w", "teacher_entropy": "teacher entropy\n(nats)"}
COLOURS = {Kind.STABLE: PALETTE[2], Kind.ERRONEOUS: PALETTE[3], Kind.RECOVERING: PALETTE[4]}
PER_ROW = 3  # methods side by side at most
FEWEST = 2  # trajectories that make a mean
Kinds = Mapping[Kind, Sequence[Sequence[StepRow]]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A measure by step over trajectories; entry k - 1 belongs to step k."""

    mean: np.ndarray  # [K]
    low: np.ndarray  # [K] 25 % quantile
    high: np.ndarray  # [K] 75 % quantile
    n: np.ndarray  # [K] int: trajectories that have the step


def curve(trajectories: Sequence[Sequence[StepRow]], measure: str, fewest: int = FEWEST) -> Curve:
    """Up to the last step that at least ``fewest`` trajectories have (a step more of one would not be of the others).

    Every step counts the trajectories that have it, so that from step to step they may be others.
    """
    steps: list[list[float]] = []
    for trajectory in trajectories:
        for k, row in enumerate(trajectory):
            steps += [[]] if k == len(steps) else []
            steps[k].append(getattr(row, measure))
    kept = [np.asarray(values) for values in steps if len(values) >= fewest]  # counts never rise from step to step
    low, high = ([float(np.quantile(values, q)) for values in kept] for q in (0.25, 0.75))
    means = np.array([values.mean() for values in kept])
    return Curve(means, np.array(low), np.array(high), np.array([len(values) for values in kept], dtype=int))


def steps_figure(methods: Mapping[str, Kinds], examples: Mapping[str, Mapping[Kind, Sequence[StepRow]]]) -> Figure:
    """Three panels a method (divergence, weight, teacher entropy), methods side by side in blocks of up to three, each
    measure on one scale. A line is the mean over the trajectories of a kind, its band their middle half; thin and
    dashed: the examples.

    Args:
        methods: name -> its trajectories by kind (``sort_by_kind``).
        examples: method -> kind -> the trajectory to draw by itself.

    Raises:
        ValueError: no method.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not methods:
        raise ValueError("steps_figure: no method, expected at least one")
    blocks = -(-len(methods) // PER_ROW)
    columns = -(-len(methods) // blocks)
    rows = len(PANELS) * blocks
    figure = Figure(figsize=(max(3.0 * columns, 6.0), 1.7 * rows + 0.5), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False)
    lines: dict[str, Any] = {}
    for number, (method, kinds) in enumerate(methods.items()):
        block, column = divmod(number, columns)
        for i, (measure, title) in enumerate(PANELS.items()):
            axis = axes[block * len(PANELS) + i][column]
            lines |= _panel(axis, kinds, examples.get(method, {}), measure)
            axis.set_ylabel(title if column == 0 else "", fontsize=9)
            axis.set_title(method if i == 0 else "", fontsize=10)
            axis.set_xlabel("step" if i == len(PANELS) - 1 else "", fontsize=9)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.tick_params(labelsize=8, labelbottom=i == len(PANELS) - 1)
            axis.grid(alpha=0.3)
    _share_scales(axes, len(methods))
    order = [kind.value for kind in NAMED] + ["example"]
    figure.legend(
        handles=[lines[k] for k in order if k in lines], loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
    return figure


def _panel(axis: Any, kinds: Kinds, examples: Mapping[Kind, Sequence[StepRow]], measure: str) -> dict[str, Any]:
    """Draw one measure of one method; lines for the legend."""
    lines: dict[str, Any] = {}
    for kind in NAMED:
        colour, found = COLOURS[kind], curve(kinds.get(kind, ()), measure)
        if found.mean.size:
            at = np.arange(1, found.mean.size + 1)
            (lines[kind.value],) = axis.plot(at, found.mean, color=colour, lw=1.8, marker="o", ms=3, label=kind.value)
            axis.fill_between(at, found.low, found.high, color=colour, alpha=0.15, lw=0)
        if kind in examples:
            values = [getattr(row, measure) for row in examples[kind]]
            thin = {"color": colour, "lw": 0.8, "ls": "--", "marker": ".", "ms": 3}
            axis.plot(range(1, len(values) + 1), values, label=f"example, {kind.value}", **thin)
            lines["example"] = _grey_line("an example")
    return lines


def _grey_line(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="0.4", lw=0.8, ls="--", marker=".", ms=3, label=label)


def _share_scales(axes: np.ndarray, methods: int) -> None:
    """One scale a measure over all methods, so that they can be compared by eye; places without a method are empty."""
    columns = axes.shape[1]
    for i in range(len(PANELS)):
        panels = axes[i :: len(PANELS)].ravel()
        drawn, unused = panels[:methods], panels[methods:]
        used = [axis for axis in drawn if axis.lines]
        limits = [axis.get_ylim() for axis in used]
        for axis in used:
            axis.set_ylim(min(0.0, *(low for low, _ in limits)), max(high for _, high in limits))
        for axis in drawn:
            axis.tick_params(labelleft=axis in panels[::columns])
            if not axis.lines:
                axis.text(0.5, 0.5, "no trajectory of these kinds", ha="center", fontsize=8, transform=axis.transAxes)
        for axis in unused:
            axis.set_visible(False)
