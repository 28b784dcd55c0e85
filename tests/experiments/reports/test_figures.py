"""Figures about calls, attempts, judges and rewards, against values worked out by hand."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from callbacks.evaluation.arcap import arcap
from callbacks.evaluation.summary import summarize
from callbacks.evaluation_rows import row_of, save_rows, valid_action_counts
from experiments.registry.columns import Column
from experiments.reports.results import measures
from rollout.trajectory import ActionKind, CallOutcome, Reward, StopReason, ToolCall, ToolRequest, ToolResult
from tests.callbacks.helpers import make_call, make_trajectory

CALL, ANSWER = ActionKind.CALL, ActionKind.ANSWER


def python(turn, outcome=CallOutcome.OK):
    return ToolCall(turn, ToolRequest("python", {"code": "1"}), ToolResult("1", outcome), 0.1)


def with_entropies(trajectory, entropies):
    turns = [dataclasses.replace(t, entropy=e) for t, e in zip(trajectory.turns, entropies, strict=True)]
    return trajectory.replace(turns=tuple(turns))


def two_tools(name="q1", **changes):
    """Search, a failing and an empty Python call, a refused one, an answer."""
    calls = (
        make_call(0, "q", ("text",)), python(1, CallOutcome.TIMEOUT), python(2, CallOutcome.EMPTY),
        python(3, CallOutcome.REFUSED),
    )  # fmt: skip
    return make_trajectory(name, calls=calls, kinds=(CALL, CALL, CALL, CALL, ANSWER), **changes)


def test_row_counts_executed_calls_and_reads_entropies():
    row = row_of(with_entropies(two_tools(), [0.9, 0.5, None, 0.1, 0.7]))
    assert (row.tool_calls, row.calls, row.executed_searches) == (3, {"python": 2, "search": 1}, 1)
    assert (row.failed_calls, row.empty_calls) == (1, 1)
    assert row.entropy_first == 0.9
    assert row.entropy_after_tools == pytest.approx((0.5 + 0.1) / 2)  # the third is not recorded, the last was refused
    bare = row_of(make_trajectory(index=3))
    assert (bare.tool_calls, bare.calls, bare.entropy_first, bare.entropy_after_tools) == (0, {}, None, None)
    assert bare.attempt == 3 and bare.reward is None and bare.reward_parts == {} and bare.math is None


def test_row_keeps_the_parts_of_the_reward_that_it_does_not_have_anyway():
    parts = {"em": 1.0, "f1": 1.0, "answered": 1.0, "math": 1.0, "format": 1.0, "both_tools": 0.0}
    row = row_of(make_trajectory().replace(reward=Reward(1.1, parts)))
    assert row.reward == 1.1 and row.reward_parts == {"math": 1.0, "format": 1.0, "both_tools": 0.0} and row.math == 1.0


def test_calls_and_what_they_bring_in():
    rows = [
        row_of(two_tools("a")),  # right, 3 calls
        row_of(make_trajectory("b", answer="grey bay", calls=(make_call(0, "q", ("x",)),))),  # f1 0.5, 1 call
        row_of(make_trajectory("c", answer="x")),  # wrong, none
        row_of(make_trajectory("e", stop=StopReason.INFRASTRUCTURE, calls=(make_call(0, "q", ("x",)),))),
    ]
    figures = summarize(rows)
    means = {name: figure.mean for name, figure in figures.items()}
    assert means["tool_calls"] == pytest.approx(4 / 3) and figures["tool_calls"].n == 3
    assert means["calls/search"] == pytest.approx(2 / 3) and means["calls/python"] == pytest.approx(2 / 3)
    assert means["failed_calls"] == means["empty_calls"] == pytest.approx(1 / 3)
    assert means["em_per_1000_calls"] == pytest.approx(1000 * 1 / 4)
    assert means["f1_per_1000_calls"] == pytest.approx(1000 * 1.5 / 4)
    assert means["tool_productivity"] == pytest.approx(100 * 0.5 * (4 / 3) / (4 / 3 + 0.1)), "acc is F1 here"
    assert figures["em_per_1000_calls"].low <= 250 <= figures["em_per_1000_calls"].high
    none = summarize([row_of(make_trajectory("c"))])
    assert "em_per_1000_calls" not in none and none["tool_productivity"].mean == 0.0
    assert not {"entropy_after_tools", "judge", "judge_failures", "reward/total", "pass/1"} & none.keys()


def test_entropy_and_reward_figures_are_over_the_rows_that_have_them():
    entropy = [with_entropies(two_tools("a"), [1.0, 0.5, 0.5, 0.5, 0.0]), two_tools("b")]
    scored = [make_trajectory("c").replace(reward=Reward(0.4, {"math": 0.0, "format": 1.0}))]
    scored += [make_trajectory("d").replace(reward=Reward(1.0, {"em": 1.0, "format": 0.0}))]
    figures = summarize([row_of(t) for t in [*entropy, *scored]])
    found = {name: (figures[name].mean, figures[name].n) for name in figures if name.startswith(("entropy", "reward"))}
    assert found == {
        "entropy_first": (1.0, 1), "entropy_after_tools": (0.5, 1), "reward/total": (0.7, 2),
        "reward/math": (0.0, 1), "reward/format": (0.5, 2),
    }  # fmt: skip
    # mathematical equality, where it is compared, is the accuracy; F1 elsewhere: 0, 1, 1, 1 over 1.5 calls
    assert figures["tool_productivity"].mean == pytest.approx(100 * 0.75 * 1.5 / 1.6)


def attempts(name, right, **changes):
    answers = ["grey harbor" if r else "x" for r in right]
    return [row_of(make_trajectory(name, answer=a, index=i, **changes)) for i, a in enumerate(answers)]


def test_several_attempts_are_averaged_within_questions():
    rows = attempts("a", [1, 1, 0, 0]) + attempts("b", [1, 1, 1, 1], source="two_hop") + attempts("c", [0, 0, 0, 0])
    figures = summarize(rows)
    assert (figures["em"].mean, figures["em"].n) == (0.5, 3)
    assert (figures["em/two_hop"].mean, figures["em/two_hop"].n) == (1.0, 1)
    single = summarize([dataclasses.replace(r, em=m, f1=m) for r, m in zip(rows[::4], [0.5, 1.0, 0.0], strict=True)])
    assert figures["em"] == single["em"] and figures["f1"] == single["f1"], "the interval resamples questions"
    naive = summarize([dataclasses.replace(r, id=f"{r.id}{r.attempt}") for r in rows])["em"]
    assert naive.high - naive.low < figures["em"].high - figures["em"].low, "as if attempts were independent"
    assert arcap(rows)["arcap/searches"].n == 3


def test_passes_count_scored_attempts_only():
    rows = attempts("a", [0, 1, 0]) + attempts("b", [0, 0, 1])
    rows[0] = dataclasses.replace(rows[0], failed=True)  # a's first attempt was spoiled: two are left
    figures = summarize(rows)
    assert (figures["pass_first/1"].mean, figures["pass_first/1"].n) == (0.5, 2), "a's first scored attempt is right"
    assert (figures["pass_first/3"].mean, figures["pass_first/3"].n) == (1.0, 2), "a's two for want of three"
    unknown = [dataclasses.replace(r, judged=None if r.attempt else 0.0, judge_failed=r.attempt == 1) for r in rows]
    assert summarize(unknown)["pass/1"].mean == pytest.approx((0.0 + 0.5) / 2), "em where nobody was asked; no guess"


def test_rows_of_different_tools_and_parts_share_a_file(tmp_path):
    rewarded = make_trajectory("b").replace(reward=Reward(1.0, {"math": 1.0}))
    path = tmp_path / "evaluation" / "test.parquet"
    save_rows(path, [row_of(two_tools("a")), row_of(rewarded)])
    frame = pl.read_parquet(path)
    assert frame["calls/python"].to_list() == [2, 0] and frame["calls/search"].to_list() == [1, 0]
    assert frame["reward/math"].to_list() == [None, 1.0] and frame["reward"].to_list() == [None, 1.0]
    assert measures(tmp_path, Column("math", "math", rows=("reward/math",))) == [{"b": 1.0}]
    per_call = Column("EM per call", "em_per_call", rows=("em", "tool_calls"))
    assert measures(tmp_path, per_call) == [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 0.0}]


def test_an_action_that_was_not_asked_for_so_is_not_valid():
    t = make_trajectory("q", calls=(make_call(0, "q", ("text",)),))
    loose = dataclasses.replace(t.turns[0], action=dataclasses.replace(t.turns[0].action, well_formed=False))
    valid, turns = valid_action_counts(t)
    assert valid_action_counts(t.replace(turns=(loose, *t.turns[1:]))) == (valid - 1, turns)
