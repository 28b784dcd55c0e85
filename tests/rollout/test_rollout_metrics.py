"""Counting over a group with forks, against counts made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    Fork,
    Reward,
    StopReason,
    Task,
    ToolCall,
    ToolRequest,
    ToolResult,
    Trajectory,
    Turn,
)
from rollout.trajectory_metrics import RolloutMetrics, first_error, is_inherited, rollout_metrics, turns_after_tools

OK, EMPTY, ERROR, REFUSED = CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.REFUSED


def member(index, turns, *, group="q", fork=None, reward=0.0, first_id=0, failed=False, tokens=10):
    """``turns``: (entropy, tool or None, outcome) per turn of four sampled tokens; a turn with a tool is followed by an
    observation of three. So turn i starts at 7 i."""
    made, calls, mask = [], [], []
    for i, (entropy, tool, outcome) in enumerate(turns):
        start = len(mask)
        end, after = start + 4, start + (7 if tool else 4)
        kind = ActionKind.CALL if tool else ActionKind.ANSWER
        made.append(Turn(start, end, Action(kind), "stop", 0, after, entropy=entropy))
        mask += [1] * 4 + [0] * (after - end)
        if tool:
            calls.append(ToolCall(i, ToolRequest(tool, {}), ToolResult("", outcome), 0.0))
    return Trajectory(
        task=Task(group, "?", ("a",), "made_up"), prompt_ids=(1, 2),
        response_ids=tuple(range(first_id, first_id + len(mask))),
        loss_mask=tuple(mask), logprobs=(0.0,) * len(mask), turns=tuple(made), calls=tuple(calls),
        stop_reason=StopReason.INFRASTRUCTURE if failed else StopReason.ANSWER, group=group, index=index, fork=fork,
        reward=None if failed else Reward(reward), tokens_computed=tokens,
    )  # fmt: skip


def family(a_failed=False):
    """a is a root; b leaves a after its search; c leaves b after b's python; d is another root, with a refused call."""
    search = (0.9, "search", OK)
    a = member(0, [search, (0.5, "python", ERROR), (0.3, None, None)], reward=1.0, failed=a_failed)
    b = member(1, [search, (0.7, "python", EMPTY), (0.1, None, None)], fork=Fork(0, 7), first_id=50)
    c = member(2, [search, (0.7, "python", EMPTY), (0.4, None, None)], fork=Fork(1, 14), first_id=60, tokens=None)
    d = member(3, [(0.8, "search", REFUSED), (2.0, None, None)], first_id=50 + 50)
    return [a, b, c, d]


def test_inherited_calls_count_once():
    figures = rollout_metrics(family())
    assert sum(len(t.executed_calls) for t in family()) == 6, "what adding them up would give"
    assert figures.tool_calls == 3  # a's search and python, b's python
    assert figures.calls == {"search": 1, "python": 2}
    assert figures.outcomes == {"ok": 1, "error": 1, "empty": 1, "refused": 1}
    assert (figures.trajectories, figures.forked) == (4, 2)
    assert (figures.response_tokens, figures.inherited_tokens) == (18 * 3 + 11, 7 + 14)
    assert (figures.tokens_computed, figures.tokens_computed_known) == (30, 3)


def test_calls_of_a_parent_that_failed_count_once_with_its_forks():
    figures = rollout_metrics(family(a_failed=True))
    assert figures.trajectories == 3 and figures.forked == 2
    assert figures.calls == {"search": 1, "python": 1}, "a's search through b and c; a's python is nobody's"


def test_entropies_are_of_own_turns_after_executed_calls():
    figures = rollout_metrics(family())
    # a: its two later turns; b: python turn and answer; c: the answer alone; d's turn follows a refusal
    assert figures.entropy_after_tools == pytest.approx((0.5 + 0.3) + (0.7 + 0.1) + 0.4)
    assert figures.turns_after_tools == 5
    a, _, c, d = family()
    assert turns_after_tools(a) == turns_after_tools(c) == [1, 2] and turns_after_tools(d) == []
    assert [is_inherited(c, i) for i in range(3)] == [True, True, False]


def test_a_turn_that_a_fork_cuts_in_two_is_its_own():
    a, *_ = family()
    inside = member(1, [(0.9, "search", OK), (0.6, "python", OK), (0.2, None, None)], fork=Fork(0, 9))
    assert [is_inherited(inside, i) for i in range(3)] == [True, False, False]
    assert rollout_metrics([a, inside]).calls == {"search": 1, "python": 2}


def test_several_calls_in_one_turn_are_told_apart():
    a, b, *_ = family()
    twice = a.replace(calls=(a.calls[0], a.calls[0], a.calls[1]))
    child = b.replace(calls=(a.calls[0], a.calls[0], b.calls[1]))
    assert rollout_metrics([twice, child]).calls == {"search": 2, "python": 2}


def test_decisions_to_fork_count_where_they_were_taken():
    a, b, *others = family()

    def decided(trajectory, probabilities):
        pairs = zip(trajectory.turns, probabilities, strict=True)
        return trajectory.replace(turns=tuple(dataclasses.replace(t, branch_probability=p) for t, p in pairs))

    a, b = decided(a, [None, 0.5, 0.25]), decided(b, [None, 0.0, 1.0])
    c = others[0].replace(turns=(*b.turns[:2], others[0].turns[2]))  # copied with b's turns
    figures = rollout_metrics([a, b, c])
    assert (figures.branch_probability, figures.branch_decisions) == (0.5 + 0.25 + 0.0 + 1.0, 4)
    assert rollout_metrics(family()).ratios()["branch_probability"] == (0, 0)


def test_distinct_is_over_groups_of_two_or_more():
    alone = member(0, [(None, None, None)], group="alone", reward=1.0)
    same = [member(i, [(None, None, None)], group="same", reward=0.5) for i in range(4)]
    half = [member(i, [(None, None, None)], group="half", reward=float(i == 0), first_id=i // 2) for i in range(4)]
    figures = rollout_metrics([alone, *same, *half])
    assert figures.reward == 4.0 and figures.rewarded == 9
    ratios = figures.ratios()
    assert ratios["distinct"] == (pytest.approx(1 / 4 + 2 / 4), 2)
    assert ratios["entropy_after_tools"] == (0.0, 0), "nothing recorded is not zero"
    assert rollout_metrics([alone]).ratios()["distinct"][1] == 0


def test_sums_over_parts_are_those_of_the_whole_and_survive_json():
    other = [t.replace(group="r") for t in family()[:2]]
    whole = rollout_metrics([*family(), *other])
    parts = [rollout_metrics(family()), rollout_metrics(other)]
    for added in (parts[0] + parts[1], sum(parts, RolloutMetrics())):
        entropy = whole.entropy_after_tools
        assert added.entropy_after_tools == pytest.approx(entropy)  # Python 3.12 adds floats up with less error
        assert dataclasses.replace(added, entropy_after_tools=entropy) == whole
    assert RolloutMetrics.from_json(json.loads(json.dumps(whole.as_json()))) == whole
    assert whole.sums() == {"trajectories": 6, "tool_calls": 6, "calls/python": 4, "calls/search": 2}
    assert rollout_metrics([]) == RolloutMetrics()


@pytest.mark.parametrize(
    ("outcomes", "invalid", "expected"),
    [
        ([OK, EMPTY, None], (), None),
        ([OK, ERROR, REFUSED, None], (), 1),
        ([OK, CallOutcome.TIMEOUT, None], (), 1),
        ([OK, OK, None], (1,), 1),
        ([OK, ERROR, None], (0,), 0),
        ([OK, None], (1,), None),
        ([OK, ERROR], (), 1),
    ],
)
def test_the_first_error_of_a_trajectory(outcomes, invalid, expected):
    t = member(0, [(None, None if o is None else "python", o) for o in outcomes])
    turns = [
        dataclasses.replace(turn, action=Action(ActionKind.INVALID)) if i in invalid else turn
        for i, turn in enumerate(t.turns)
    ]
    calls = tuple(call for call in t.calls if call.turn not in invalid)
    assert first_error(t.replace(turns=tuple(turns), calls=calls)) == expected
