"""Prefixes of one model's trajectories, continued by another."""

from __future__ import annotations

import dataclasses

from callbacks.evaluation.continuations import CLEAN, DRIFTED, prefixes
from rollout.samplers.continuation import ContinuationSampler
from rollout.trajectory import ActionKind, CallOutcome
from tests.callbacks.helpers import make_call, make_trajectory
from tests.rollout.samplers.branching_world import SAMPLING, always, tasks

CALL, ANSWER = ActionKind.CALL, ActionKind.ANSWER


def test_a_continuation_begins_as_its_prefix_and_is_sampled_anew(world):
    system = world.make(always(3))
    whole = system.rollout(tasks(2), n=1, sampling=SAMPLING, seed=0)
    asked = [dataclasses.replace(t.task, id=f"{t.task.id} {turn}") for t in whole for turn in (1, 2)]
    starts = [(t, t.turns[turn].start) for t in whole for turn in (1, 2)]
    sampler = ContinuationSampler({task.id: start for task, start in zip(asked, starts, strict=True)})
    found = system.rollout(asked, n=1, sampling=SAMPLING, seed=1, sampler=sampler)
    assert [t.task.id for t in found] == [task.id for task in asked]
    for trajectory, (start, at) in zip(found, starts, strict=True):
        assert trajectory.response_ids[:at] == start.response_ids[:at] and trajectory.fork.at == at
        assert len(trajectory.response_ids) > at
    assert [t.response_ids for t in found] != [start.response_ids for start, _ in starts], "another seed"


def test_prefixes_are_clean_until_something_went_wrong():
    failed = (make_call(0, "q", ()), make_call(1, "q", (), CallOutcome.ERROR), make_call(2, "q", ()))
    trajectory = make_trajectory("q1", kinds=(CALL, CALL, CALL, ANSWER), calls=failed)
    assert {kind: [turn for _, turn in found] for kind, found in prefixes([trajectory], None).items()} == {
        CLEAN: [1],
        DRIFTED: [2, 3],
    }

    class Expert:
        def verdicts(self, trajectory):
            return [False, True, True, None]

    assert [turn for _, turn in prefixes([trajectory], Expert())[DRIFTED]] == [1, 2, 3]
