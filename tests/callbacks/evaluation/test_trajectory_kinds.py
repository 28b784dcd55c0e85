"""Kinds of trajectories: hand-made ones on each side of every condition, and the paper's three cases."""

from __future__ import annotations

import itertools

import pytest

from callbacks.evaluation.trajectory_kinds import Bounds, Kind, kind_of, sort_by_kind
from tests.callbacks.evaluation.turn_score_helpers import CASE_A, CASE_B, CASE_C, make_scores, weights_of


def turns(weights, outcomes, **options):
    return make_scores([1.0 / w for w in weights], outcomes, weights=weights, **options)


def test_weights_of_the_papers_cases():
    assert weights_of(CASE_A[0]) == pytest.approx([1.0, 1.2, 1.2])
    assert weights_of(CASE_B[0]) == pytest.approx([1.0, 0.363, 0.170], abs=5e-4)
    assert weights_of(CASE_C[0]) == pytest.approx([1.0, 0.732, 0.556, 0.411, 0.769, 1.111, 1.2], abs=5e-4)


@pytest.mark.parametrize(("case", "kind"), [(CASE_A, Kind.STABLE), (CASE_B, Kind.ERRONEOUS), (CASE_C, Kind.RECOVERING)])
def test_the_papers_cases(case, kind):
    assert kind_of(make_scores(*case)) is kind


@pytest.mark.parametrize(
    ("weights", "outcomes", "kind"),
    [
        # stable: no error and no low weight, two turns at least
        ((1.0, 0.7), "ok answer", Kind.STABLE),  # the bound itself is not low
        ((1.0, 0.69), "ok answer", Kind.OTHER),  # low without an error
        ((1.0,), "answer", Kind.OTHER),
        ((1.0, 0.9, 0.95), "empty ok none", Kind.STABLE),  # neither empty output nor a cut last turn is an error
        # erroneous: an error, then low to the end
        ((1.0, 0.69), "error answer", Kind.ERRONEOUS),
        ((1.0, 0.7), "error answer", Kind.OTHER),  # an error without a trace
        ((1.0, 0.2), "ok error", Kind.OTHER),  # nothing follows the error
        ((1.0, 0.2, 0.9, 0.2, 0.2), "error ok error ok answer", Kind.ERRONEOUS),  # from the second error on
        ((1.0, 0.2, 0.9, 0.2), "error ok ok answer", Kind.OTHER),  # not low all the way, and not back up
        ((1.0, 0.2, 0.2), "ok ok answer", Kind.OTHER),
        # recovering: an error, low, then up again without another error
        ((1.0, 0.5, 0.9), "error ok answer", Kind.RECOVERING),
        ((1.0, 0.5, 0.89), "error ok answer", Kind.OTHER),  # not far enough
        ((1.0, 0.5, 1.2), "ok error answer", Kind.RECOVERING),  # the erroneous turn itself is the low one
        ((1.0, 0.5, 1.2, 1.2), "ok ok error answer", Kind.OTHER),  # low before the error
        ((1.0, 0.5, 1.0, 1.0), "error ok error answer", Kind.OTHER),  # another error after the low weights
        ((1.0, 0.5, 1.2, 0.8), "error ok ok answer", Kind.OTHER),  # it did not stay up
        ((1.0, 0.5, 1.0, 1.0, 0.95), "invalid ok ok ok answer", Kind.RECOVERING),
    ],
)
def test_both_sides_of_every_condition(weights, outcomes, kind):
    assert kind_of(turns(weights, outcomes.split())) is kind


@pytest.mark.parametrize("outcome", ["error", "timeout", "refused", "invalid"])
def test_what_is_an_error(outcome):
    assert kind_of(turns((1.0, 0.5), (outcome, "answer"))) is Kind.ERRONEOUS


def test_the_bounds_are_arguments():
    case = turns((1.0, 0.5, 0.8), ("error", "ok", "answer"))
    assert kind_of(case) is Kind.OTHER
    assert kind_of(case, Bounds(low=0.6, recovered=0.75)) is Kind.RECOVERING
    assert kind_of(case, Bounds(low=0.81, recovered=0.9)) is Kind.ERRONEOUS
    assert kind_of(case, Bounds(low=0.4, recovered=0.9)) is Kind.OTHER
    with pytest.raises(ValueError, match="expected 0 < low <= recovered"):
        Bounds(low=0.9, recovered=0.5)


def definitions(trajectory, low, recovered):
    """The definitions again, word by word: every kind for itself, over all choices of turns."""
    wrong = {row.turn for row in trajectory if row.outcome in ("error", "timeout", "refused", "invalid")}
    w = {row.turn: row.weight for row in trajectory}
    last = len(trajectory)
    kinds = set()
    if last >= 2 and not wrong and all(value >= low for value in w.values()):
        kinds.add(Kind.STABLE)
    if any(e in wrong and all(w[k] < low for k in range(e + 1, last + 1)) for e in range(1, last)):
        kinds.add(Kind.ERRONEOUS)
    for at in range(1, last):
        is_last_low = w[at] < low and all(w[k] >= low for k in range(at + 1, last + 1))
        after = set(range(at + 1, last + 1))
        if is_last_low and wrong - after and not wrong & after and w[last] >= recovered:
            kinds.add(Kind.RECOVERING)
    return kinds or {Kind.OTHER}


def test_every_trajectory_is_of_exactly_one_kind_and_of_the_one_defined():
    seen = set()
    for count in range(1, 5):
        for weights in itertools.product((0.5, 0.8, 1.1), repeat=count - 1):
            for outcomes in itertools.product(("ok", "error"), repeat=count):
                trajectory = turns((1.0, *weights), outcomes)
                expected = definitions(trajectory, 0.7, 0.9)
                assert {kind_of(trajectory)} == expected, (weights, outcomes)
                seen |= expected
    assert seen == set(Kind)


def test_sorting_keeps_all_and_names_empty_kinds():
    made = [make_scores(*case, name=f"q{i}") for i, case in enumerate((CASE_A, CASE_B, CASE_B))]
    kinds = sort_by_kind(made)
    assert {kind: len(found) for kind, found in kinds.items()} == {
        Kind.STABLE: 1, Kind.ERRONEOUS: 2, Kind.RECOVERING: 0, Kind.OTHER: 0,
    }  # fmt: skip
