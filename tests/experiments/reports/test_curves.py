"""Curves of a results page."""

from __future__ import annotations

import polars as pl
import pytest

from experiments.reports.compare import HISTORY_SCHEMA
from experiments.reports.curves import PALETTE, curves_figure


def history(methods, metrics=("train/em",), seeds=2, steps=3):
    points = [
        (f"{method}{seed}", method, metric, step, 0.1 * step + seed)
        for method in methods
        for metric in metrics
        for seed in range(seeds)
        for step in range(steps)
    ]
    return pl.DataFrame(points, schema=HISTORY_SCHEMA, orient="row")


def test_a_method_is_one_line_of_its_colour_in_a_band_over_its_seeds():
    methods = ["SDAR", "GRPO", "not logged"]
    figure = curves_figure(history(["GRPO", "SDAR"]), ["train/em", "train/kl"], methods)
    (axis,) = figure.axes
    assert [line.get_color() for line in axis.lines] == [*PALETTE[:2]]
    assert axis.lines[0].get_ydata() == pytest.approx([0.5, 0.6, 0.7])
    band = axis.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.0, 1.2)), "lowest and highest seed"
    assert axis.get_ylabel() == "train/em" and axis.get_xlabel() == "iteration"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SDAR", "GRPO"]
    with pytest.raises(ValueError, match="no points for any of"):
        curves_figure(history(["SDAR"]), ["train/loss"], methods)


def test_each_metric_with_several_steps_has_a_panel_and_many_methods_look_different():
    methods = [f"m{i}" for i in range(11)]
    once = history(methods, ["val/em"], steps=1)  # a single step is no curve
    both = pl.concat([history(methods, ["train/em", "train/kl", "train/loss"]), once])
    figure = curves_figure(both, ["train/em", "val/em", "train/kl", "train/loss"], methods)
    assert [axis.get_ylabel() for axis in figure.axes if axis.get_visible()] == ["train/em", "train/kl", "train/loss"]
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 11
    assert len(curves_figure(once, ["val/em"], methods).axes) == 1, "unless there is nothing else"
