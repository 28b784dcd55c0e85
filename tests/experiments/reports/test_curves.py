"""Curves of a results page."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from experiments.reports.compare import HISTORY_SCHEMA
from experiments.reports.curves import FIRST, PALETTE, TOGETHER, curves_figure, styles


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
    looks = styles(["SDAR", "GRPO", "SDAR", "not logged"])
    (axis,) = curves_figure(history(["GRPO", "SDAR"]), ["train/em", "train/kl"], looks).axes
    assert [line.get_color() for line in axis.lines] == [FIRST, PALETTE[0]]
    assert axis.lines[0].get_ydata() == pytest.approx([0.5, 0.6, 0.7])
    band = axis.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((0.0, 1.2)), "lowest and highest seed"
    assert axis.get_ylabel() == "train/em\n(share)" and axis.get_xlabel() == "iteration"
    with pytest.raises(ValueError, match="no points for any of"):
        curves_figure(history(["SDAR"]), ["train/loss"], looks)


def test_many_methods_are_shared_out_among_columns_which_all_have_the_first():
    methods = [f"m{i}" for i in range(11)]
    looks = styles(methods)
    assert len({str(look) for look in looks.values()}) == 11
    once = history(methods, ["val/em"], steps=1)  # a single step is no curve
    figure = curves_figure(
        pl.concat([history(methods, ["train/em", "train/kl"]), once]), ["train/em", "val/em", "train/kl"], looks
    )
    panels = np.array(figure.axes).reshape(2, 3)
    drawn = [[line.get_label() for line in axis.lines] for axis in panels[1]]
    assert all(names[0] == "m0" and len(names) <= TOGETHER for names in drawn)
    assert sorted(name for names in drawn for name in names[1:]) == sorted(methods[1:])
    assert panels[0, 0].get_ylim() == panels[0, 2].get_ylim()
    assert len(curves_figure(once, ["val/em"], looks).axes) == 3, "unless there is nothing else"


def test_groups_have_a_column_each():
    looks = styles(["A, easy", "B, easy", "A, hard", "B, hard"])
    groups = [["A, easy", "B, easy"], ["A, hard", "not logged"]]
    figure = curves_figure(history(["A, easy", "B, easy", "A, hard"]), ["train/em"], looks, groups)
    drawn = [[line.get_label() for line in axis.lines] for axis in figure.axes]
    assert drawn == [["A, easy", "B, easy"], ["A, hard"]]
