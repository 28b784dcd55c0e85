"""Figures of several attempts against slow forms, values worked out by hand and the spec's numbers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest

from callbacks.evaluation.attempts import _draws, best_bootstrap, maj_bootstrap, majority, united
from callbacks.evaluation.statistics import bootstrap_interval
from callbacks.evaluation.summary import summarize
from callbacks.evaluation_rows import row_of
from rollout.trajectory import (
    ENDED_HERE,
    ActionKind,
    CallOutcome,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
)
from tests.callbacks.helpers import make_trajectory

CALL, ANSWER, INVALID = ActionKind.CALL, ActionKind.ANSWER, ActionKind.INVALID


def rows_of(name, votes, source="aime24", ability="math", **changes):
    """Votes: (answer or None, right)."""
    made = []
    for index, (answer, right) in enumerate(votes):
        task = Task(name, "?", ("four",), source, metadata={"ability": ability})
        t = make_trajectory(name, answer=answer, index=index)
        made.append(row_of(t.replace(task=task, reward=Reward(-1.0, {"acc": right}))))
    return [dataclasses.replace(row, **changes) for row in made]


def slow_majority(votes, k):
    """Every draw of k votes in turn; ties share the draw."""
    won = []
    for draw in itertools.combinations(votes, k):
        counted = Counter(answer for answer, _ in draw if answer)
        best = [answer for answer, count in counted.items() if count == max(counted.values())]
        right = [np.mean([r for answer, r in votes if answer == winner]) for winner in best]
        won.append(np.mean(right) if right else 0.0)
    return np.mean(won)


@pytest.mark.parametrize("seed", range(4))
def test_majority_is_the_expectation_over_all_draws(seed):
    rng = random.Random(seed)
    right = {answer: rng.choice([0.0, 1.0]) for answer in "abcd"} | {"": 0.0}
    votes = [(answer, right[answer]) for answer in rng.choices(["a", "b", "c", "d", ""], [4, 2, 2, 1, 2], k=8)]
    if seed % 3 == 0:
        votes[0] = (votes[0][0], 0.5)  # a judge that does not agree with itself
    found = majority(votes, range(1, 9))
    assert found == pytest.approx({k: slow_majority(votes, k) for k in range(1, 9)})
    rng.shuffle(votes)
    assert majority(votes, [3]) == pytest.approx({3: found[3]}), "the order of attempts says nothing"


def test_draws_are_those_of_a_generator_seeded_at_every_call():
    np.random.seed(42)
    one_by_one = [np.random.choice(5, size=3, replace=True) for _ in range(1000)]
    assert np.array_equal(_draws(5, 3), one_by_one)


@pytest.mark.parametrize(("c", "k", "expected"), [(2, 32, 0.873), (1, 8, 0.224)])
def test_best_bootstrap_is_biased_as_the_spec_says(c, k, expected):
    assert 1 - (1 - c / 32) ** k == pytest.approx(expected, abs=6e-4)
    found = best_bootstrap([1.0] * c + [0.0] * (32 - c), k)
    error = (expected * (1 - expected) / 1000) ** 0.5
    assert found == pytest.approx(expected, abs=4 * error) and 0 < found < 1


@pytest.mark.parametrize(
    ("votes", "number"),  # how many different answers there are
    [
        ([("33", 0.0), ("033", 0.0), ("33.0", 0.0)], 1),
        ([("1/2", 1.0), ("0.5", 1.0), ("\\frac12", 1.0)], 1),  # found right: the gold answer
        ([("1", 0.0), ("0.5", 1.0)], 2),
        ([("", 0.0), ("", 0.0), ("a", 0.0), ("A", 0.0)], 3),
    ],
)
def test_equal_answers_are_one_vote(votes, number):
    assert len({answer for answer, _ in united(votes)}) == number
    assert [right for _, right in united(votes)] == [right for _, right in votes]


def test_figures_of_an_evaluation():
    a = rows_of("a", [("4", 1.0), (" 4", 1.0), ("5", 0.0), (None, 0.0)])
    b = rows_of("b", [("1", 0.0), ("2", 0.0), ("3", 0.0), ("4", 1.0)])
    c = rows_of("c", [(None, 0.0)] * 4)
    figures = summarize([*a, *b, *c])
    means = {name: figure.mean for name, figure in figures.items()}
    assert means["average/4"] == means["acc"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert means["em"] != means["acc"], "the reward's own verdict counts, not exact match"
    assert means["pass/4"] == pytest.approx(2 / 3) and means["pass/2"] == pytest.approx((5 / 6 + 0.5 + 0) / 3)
    assert means["pass_first/2"] == pytest.approx(1 / 3)
    assert means["maj/4"] == pytest.approx((1 + 0.25 + 0) / 3), "'4' and ' 4' are one vote; nothing but abstentions: 0"
    assert means["maj/2"] == pytest.approx(np.mean([slow_majority([(r.answer and r.answer.strip(), r.accuracy)
                                                                  for r in q], 2) for q in (a, b, c)]))  # fmt: skip
    assert means["best_bootstrap/4"] == pytest.approx((0.9375 + (1 - 0.75**4)) / 3, abs=0.03)
    assert means["maj_bootstrap/4"] < means["maj/4"] and "maj_bootstrap/3" not in figures
    families = {"average", "pass", "pass_first", "maj", "best_bootstrap", "maj_bootstrap"}
    assert {name.split("/")[0] for name in figures} >= families
    assert figures["average/4"] == bootstrap_interval([0.5, 0.25, 0.0]), "intervals resample the three problems"
    assert not any("/aime24" in name for name in figures if name.startswith(("average", "pass", "maj")))


def test_by_source_programs_and_single_attempts():
    math = rows_of("a", [("4", 1.0), ("4", 1.0)])
    code = rows_of("p", [(None, 1.0), (None, 0.0)], source="lcb", ability="code")
    figures = summarize([*math, *code])
    assert (figures["average/2/aime24"].mean, figures["average/2/lcb"].mean) == (1.0, 0.5)
    assert (figures["pass/2/lcb"].mean, figures["acc/lcb"].mean) == (1.0, 0.5)
    assert figures["maj/2"].n == figures["maj/2/aime24"].n == 1 and figures["maj/2"].mean == 1.0
    assert "maj/2/lcb" not in figures, "programs are not voted on"
    assert not any(name.startswith("maj") for name in summarize(rows_of("p", [(None, 1.0), (None, 0.0)], ability=None)))
    single = summarize([math[0]])
    assert single["acc"].mean == 1.0 and not any(n.startswith(("average", "pass", "maj", "best")) for n in single)


def test_a_question_that_lost_attempts_stays_in_with_those_it_has():
    full = rows_of("a", [("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0)])
    lost = rows_of("b", [("4", 1.0), ("5", 0.0), ("5", 0.0), ("4", 1.0)])
    lost[1] = dataclasses.replace(lost[1], failed=True)
    figures = summarize([*full, *lost])
    assert {figures[f"{family}/4"].n for family in ("average", "pass", "pass_first", "maj", "best_bootstrap")} == {2}
    assert figures["pass/2"].mean == pytest.approx((5 / 6 + 1) / 2) and figures["pass/4"].mean == 1.0
    assert figures["maj/4"].mean == pytest.approx((0.5 + 1.0) / 2), "two against one of the three left"
    assert figures["maj_bootstrap/4"].mean == pytest.approx(
        (maj_bootstrap([("4", 1.0)] * 2 + [("5", 0.0)] * 2, 4) + maj_bootstrap([("4", 1), ("5", 0), ("4", 1)], 3)) / 2
    )
    assert sorted(name for name in figures if name.startswith("pass")) == [
        "pass/1", "pass/2", "pass/4", "pass_first/1", "pass_first/2", "pass_first/4",
    ]  # fmt: skip


def test_average_of_sets_weighs_the_sets_alike():
    easy = [row for i in range(3) for row in rows_of(f"a{i}", [("4", 1.0), ("4", 1.0)])]
    hard = rows_of("b", [("4", 1.0), ("5", 0.0)], source="gpqa") + rows_of("c", [("5", 0.0)] * 2, source="gpqa")
    figures = summarize([*easy, *hard])
    assert figures["average/2"].mean == pytest.approx((3 + 0.5 + 0) / 5)
    macro = figures["average_of_sets/2"]
    assert (macro.mean, macro.n) == (pytest.approx((1 + 0.25) / 2), 5)
    # the easy set is the same in every draw; the hard one has 0, 0.25 or 0.5
    assert (macro.low, macro.high) == (0.5, 0.75)
    assert not any(name.startswith("average_of_sets") for name in summarize(easy))
    once = summarize([row for row in (*easy, *hard) if row.attempt == 0])  # 3 of 3 right, and 1 of 2
    assert once["acc"].mean == pytest.approx(4 / 5) and once["average_of_sets/1"].mean == pytest.approx(0.75)
    assert not any(name.startswith(("average/", "pass", "maj")) for name in once), "of several attempts alone"


def test_attempts_that_infrastructure_spoiled_enter_nothing():
    rows = rows_of("a", [("4", 1.0), ("5", 0.0), ("4", 1.0)]) + rows_of("b", [("5", 0.0)] * 3)
    spoiled = make_trajectory("a", answer="5", index=3, stop=StopReason.INFRASTRUCTURE, kinds=(INVALID,))
    failed = row_of(spoiled.replace(calls=(call(0, CallOutcome.OK), call(0, CallOutcome.INFRASTRUCTURE))))
    without, with_failed = summarize(rows), summarize([*rows, failed])
    assert with_failed.pop("infrastructure_failures").mean == pytest.approx(1 / 7)
    assert without.pop("infrastructure_failures").mean == 0.0
    assert with_failed == without
    assert without["average/3"].mean == pytest.approx(1 / 3)


def test_judges_and_rewards_decide_in_order():
    row = rows_of("a", [("4", 1.0)])[0]
    assert row.accuracy == 1.0
    assert dataclasses.replace(row, judged=0.0).accuracy == 0.0
    assert dataclasses.replace(row, judge_failed=True).accuracy is None
    assert dataclasses.replace(row, reward_parts={"math": 0.0}).accuracy == 0.0
    plain = dataclasses.replace(row, reward_parts={}, em=1.0, f1=0.5)
    assert (plain.accuracy, plain.soft_accuracy) == (1.0, 0.5)
    unjudged = [dataclasses.replace(row, attempt=i, judge_failed=True) for i in range(2)]
    assert "average/2" not in summarize(unjudged)


# --- calls that succeed -----------------------------------------------------------------------------------------------


def call(turn, outcome, text="1", detail=None):
    return ToolCall(turn, ToolRequest("code_interpreter", {"code": "1"}), ToolResult(text, outcome, (), detail), 0.1)


def test_tool_success_counts_every_attempt_at_a_call():
    calls = (
        call(0, CallOutcome.OK),
        call(1, CallOutcome.EMPTY, "(nothing was printed)"),
        call(2, CallOutcome.ERROR, "Traceback (most recent call last): ..."),
        call(3, CallOutcome.TIMEOUT, "stopped after 5 s"),
        call(4, CallOutcome.REFUSED, "No further call of code_interpreter is allowed.", "limit"),
        call(6, CallOutcome.REFUSED, "", f"{ENDED_HERE}: length"),
    )
    kinds = (CALL, CALL, CALL, CALL, CALL, INVALID, CALL)
    row = row_of(make_trajectory("a", calls=calls, kinds=kinds))
    assert (row.succeeded_calls, row.attempted_calls) == (2, 6), "the malformed one counts, the cut off one does not"
    assert (row.unmarked_calls, row.returned_calls) == (4, 5), "by its text only the traceback failed"
    other = row_of(make_trajectory("b", calls=(call(0, CallOutcome.OK),)))
    figures = summarize([row, other, row_of(make_trajectory("c"))])
    assert figures["tool_success"].mean == pytest.approx(3 / 7) and figures["tool_success"].n == 3
    assert figures["tool_success_as_released"].mean == pytest.approx(5 / 6)
    assert figures["tool_success"].low <= 3 / 7 <= figures["tool_success"].high
    assert "tool_success" not in summarize([row_of(make_trajectory("c"))])


def test_turns_that_were_cut_are_no_failed_calls():
    done = (call(0, CallOutcome.OK),)

    def attempted(stop, **changes):
        made = make_trajectory("a", calls=done, kinds=(CALL, INVALID), stop=stop)
        action = dataclasses.replace(made.turns[1].action, ended=changes.pop("ended", True))
        last = dataclasses.replace(made.turns[1], action=action, **changes)
        return row_of(made.replace(turns=(made.turns[0], last))).attempted_calls

    assert attempted(StopReason.MAX_TURNS) == 2, "the model ended it: a malformed call"
    assert attempted(StopReason.MAX_TURNS, ended=False) == 1, "cut by the limit of a turn"
    assert attempted(StopReason.MAX_TURNS, finish_reason="length") == 1, "the same, by a protocol that does not tell"
    assert attempted(StopReason.LENGTH, ended=False, finish_reason="length") == 1
    assert attempted(StopReason.LENGTH) == 1, "no budget was left to tell the model"
    both = make_trajectory("a", calls=done, kinds=(CALL, INVALID, INVALID), stop=StopReason.LENGTH)
    assert row_of(both).attempted_calls == 2, "the first one went on"
