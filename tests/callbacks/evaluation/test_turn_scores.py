"""Turns as rows: how each ended, what a module must give, means and intervals, the file."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from callbacks.evaluation.turn_scores import (
    ERRONEOUS,
    MEASURES,
    SCORES_FILE,
    after_error,
    by_trajectory,
    load_scores,
    outcome_of,
    save_scores,
    score_metrics,
    turn_scores,
    turns_with_tokens,
)
from rollout.trajectory import ActionKind, CallOutcome, Reward, StopReason
from rollout.trajectory_metrics import first_error
from tests.callbacks.evaluation.turn_score_helpers import make_scores
from tests.callbacks.helpers import make_call, make_trajectory

CALL, ANSWER, INVALID = ActionKind.CALL, ActionKind.ANSWER, ActionKind.INVALID


def calls(*outcomes, turn=0):
    return tuple(make_call(turn, "q", (), outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([CallOutcome.OK], "ok"),
        ([CallOutcome.EMPTY], "empty"),
        ([CallOutcome.OK, CallOutcome.EMPTY], "empty"),
        ([CallOutcome.OK, CallOutcome.ERROR], "error"),
        ([CallOutcome.TIMEOUT, CallOutcome.ERROR], "timeout"),
        ([CallOutcome.REFUSED, CallOutcome.EMPTY], "refused"),
    ],
)
def test_the_worst_call_says_how_a_step_ended(outcomes, expected):
    trajectory = make_trajectory(calls=calls(*outcomes))
    assert [outcome_of(trajectory, k) for k in (0, 1)] == [expected, "answer"]


def test_a_last_step_that_came_to_nothing():
    """Cut, or out of turns: its calls were recorded as refused, or it could not be read."""
    refused = make_trajectory(
        kinds=(INVALID, CALL), calls=calls(CallOutcome.REFUSED, turn=1), stop=StopReason.MAX_TURNS, answer=None
    )
    assert [outcome_of(refused, k) for k in (0, 1)] == ["invalid", "none"]
    cut = make_trajectory(kinds=(CALL, INVALID), calls=calls(CallOutcome.OK), stop=StopReason.LENGTH, answer=None)
    assert [outcome_of(cut, k) for k in (0, 1)] == ["ok", "none"]
    executed = make_trajectory(kinds=(CALL,), calls=calls(CallOutcome.ERROR), stop=StopReason.MAX_TURNS, answer=None)
    assert outcome_of(executed, 0) == "error"


def test_errors_are_those_that_the_algorithms_see():
    """``rollout.trajectory_metrics.first_error`` says after which turn a signal is decayed or masked."""
    kinds, outcomes = (CALL, ANSWER, INVALID), list(CallOutcome)[:-1]  # all but infrastructure
    for first, last, a, b in itertools.product(kinds, kinds, outcomes, outcomes):
        made = (calls(a) if first is CALL else ()) + (calls(b, a, turn=1) if last is CALL else ())
        trajectory = make_trajectory(kinds=(first, last), calls=made)
        wrong = [k for k in (0, 1) if outcome_of(trajectory, k) in ERRONEOUS]
        assert min(wrong, default=None) == first_error(trajectory), (first, last, a, b)


def figures_of(count):
    return {name: [i + k / 10 for k in range(count)] for i, name in enumerate(MEASURES)}


def test_rows_of_a_trajectory():
    trajectory = make_trajectory("q7", index=3, calls=calls(CallOutcome.ERROR), tokens=6)
    first, last = turn_scores(trajectory, figures_of(2))
    assert (first.id, first.attempt, first.data_source, first.tokens) == ("q7", 3, "one_hop", 6)
    assert [(r.turn, r.turns, r.outcome) for r in (first, last)] == [(1, 2, "error"), (2, 2, "answer")]
    assert (last.divergence, last.weight, last.signed, last.teacher_entropy) == (0.1, 1.1, 2.1, 3.1)
    assert first.acc is None
    right = trajectory.replace(reward=Reward(-0.2, {"acc": 1.0, "overlong": -1.2}))
    assert [row.acc for row in turn_scores(right, figures_of(2))] == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"weight": [1.0]}, {"weight": [1.0, float("nan")]}, {"weight": None}])
def test_a_module_that_gives_something_else_is_told(wrong):
    figures = {k: v for k, v in (figures_of(2) | wrong).items() if v is not None}
    expected = r"trajectory q1/0: .* as 'weight', expected one finite number .* the 2 turns that hold"
    with pytest.raises(ValueError, match=expected):
        turn_scores(make_trajectory(), figures)


def test_figures_by_hand():
    made = [
        make_scores((0.2, 0.4), ("error", "answer"), entropies=(0.5, 1.5)),
        make_scores((0.4, 0.8, 0.1), ("ok", "timeout", "answer"), attempt=1, entropies=(0.7, 0.1, 0.1)),
        make_scores((0.3,), ("answer",), name="q2", entropies=(0.0,)),
    ]
    found = score_metrics(made, resamples=500)
    means = {name: (figure.mean, figure.n) for name, figure in found.items() if not name.endswith("/3")}
    close = {
        "turns/divergence/1": (0.3, 3), "turns/divergence/2": (0.6, 2), "turns/weight/1": (1.0, 3),
        "turns/weight/2": (0.5, 2), "turns/teacher_entropy/1": (0.4, 3), "turns/teacher_entropy/2": (0.8, 2),
        "turns/divergence/after_error": (0.25, 2), "turns/weight/after_error": ((0.5 + 1.2) / 2, 2),
    }  # fmt: skip
    assert set(means) == set(close)
    for name, (mean, n) in close.items():
        assert means[name] == (pytest.approx(mean, abs=1e-5), n), name
    # Attempts at one question go together: with one question left there is nothing to resample.
    assert found["turns/divergence/2"].low == pytest.approx(0.6) == found["turns/divergence/2"].high
    assert found["turns/teacher_entropy/1"].low == pytest.approx(0.0)  # q2 alone
    assert found["turns/teacher_entropy/1"].high == pytest.approx(0.6)  # q1 alone
    assert score_metrics([]) == {}


def test_a_turn_without_a_token_has_no_row():
    """As the modules count them; what became of it stays with its turn."""
    made = make_trajectory(kinds=(CALL, INVALID, ANSWER), calls=calls(CallOutcome.ERROR))
    one, two, three = made.turns
    cut = dataclasses.replace(two, end=two.start, observation_end=two.start)
    made = made.replace(
        loss_mask=(*made.loss_mask[: two.start], *[0] * (three.start - two.start), *made.loss_mask[three.start :]),
        logprobs=(0.0,) * len(made.response_ids), turns=(one, cut, three),
    )  # fmt: skip
    assert turns_with_tokens(made) == [0, 2]
    assert [(r.turn, r.turns, r.outcome) for r in turn_scores(made, figures_of(2))] == [
        (1, 2, "error"),
        (2, 2, "answer"),
    ]


def test_the_steps_after_an_error():
    made = make_scores((0.1,) * 5, ("invalid", "timeout", "ok", "refused", "answer"))
    assert [row.turn for row in after_error(made)] == [2, 3, 5]


def test_the_file_gives_back_what_was_written(tmp_path):
    first = make_scores((0.2, 0.4), ("error", "answer"), acc=None)
    second = make_scores((0.1,), ("none",), attempt=1, acc=0.0)
    save_scores(tmp_path / SCORES_FILE, [*second, *reversed(first)])
    assert by_trajectory(load_scores(tmp_path)) == [first, second]
    save_scores(tmp_path / SCORES_FILE, [])
    assert load_scores(tmp_path) == [] and load_scores(tmp_path / "elsewhere") is None
