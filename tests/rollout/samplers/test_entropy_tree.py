"""AT2PO's sampler: which turns are sampled again, with what before them, and that every group has n members."""

import pytest

from rollout.samplers.base import IndependentSampler
from rollout.samplers.entropy_tree import EntropyTreeSampler
from rollout.trajectory import StopReason
from tests.rollout.samplers.branching_world import always, check_group, mixed
from tests.rollout.samplers.test_branching import groups_of, roll, shape


def unsure_after(world, results):
    """Options of an engine whose tokens have 2 nats after so many results, and 0.5 elsewhere."""
    return {"engine": {"logprob": lambda ids: -2.0 if world.results(ids) == results else -0.5}}


@pytest.mark.parametrize("calls", [always(0), always(1), always(3), always(-1), mixed])
@pytest.mark.parametrize(("n", "rounds", "expansions"), [(10, 2, 3), (4, 1, 3), (9, 4, 2)])
def test_exactly_n_in_every_case(world, calls, n, rounds, expansions):
    system = world.make(calls, sampler=EntropyTreeSampler(rounds, expansions))
    groups = roll(system, 3, n)
    assert sum(check_group(group, n, system, False) for group in groups) == len(system.retriever.queries)
    for group in groups:
        assert sum(t.fork is None for t in group) >= n - rounds * expansions


def test_the_least_certain_turns_are_sampled_again(world):
    """The third turns of the first three of four trajectories, before the first turns and the prompt."""
    sampler = EntropyTreeSampler(rounds=1, expansions=3)
    [group], _, _ = groups_of(world, sampler, always(3), 1, 7, **unsure_after(world, 2))
    for number, child in enumerate(group[4:]):
        parent = group[child.fork.parent]
        assert child.fork.parent == number and parent.fork is None
        assert child.fork.at == parent.turns[2].start == child.turns[2].start
        words = [t.response_ids[t.turns[2].start : t.turns[2].end] for t in (child, parent)]
        assert words[0] != words[1], "this very turn, again"


def test_a_second_round_prefers_turns_without_siblings(world):
    """A turn that was sampled again, and its sibling, score 0.05 less: the fourth trajectory's turn comes first."""
    options = unsure_after(world, 2)
    [group], _, _ = groups_of(world, EntropyTreeSampler(2, 3), always(3), 1, 10, **options)
    assert [t.fork.parent for t in group[4:]] == [0, 1, 2, 3, 0, 1]
    again = EntropyTreeSampler(2, 3, sibling_penalty=0.0)
    [other], _, _ = groups_of(world, again, always(3), 1, 10, **options)
    assert [t.fork.parent for t in other[4:]] == [0, 1, 2, 0, 1, 2]
    assert len({t.response_ids for t in other}) == 10, "each with its own seed"


def test_first_turns_begin_at_the_prompt(world):
    """They have three siblings, and are chosen where they are much less certain."""
    [group], _, _ = groups_of(world, EntropyTreeSampler(1, 3), always(2), 1, 7, **unsure_after(world, 0))
    assert all(t.fork is None for t in group)
    [other], _, _ = groups_of(world, EntropyTreeSampler(1, 3), always(2), 1, 7)
    assert [t.fork.parent for t in other[4:]] == [0, 1, 2], "equally certain: turns without siblings"


def test_answers_alone_begin_again_at_the_prompt(world):
    """Only turns that others follow are candidates: without a search, each expansion is another trajectory."""
    [group], _, system = groups_of(world, EntropyTreeSampler(2, 3), always(0), 1, 8)
    alone = roll(world.make(always(0), sampler=IndependentSampler()), 1, 8)[0]
    assert [t.response_ids for t in group] == [t.response_ids for t in alone]


def test_groups_depend_on_their_seed_alone(world):
    def shapes(seed=0, **options):
        return [shape(g) for g in roll(world.make(mixed, sampler=EntropyTreeSampler(2, 3), **options), 4, 9, seed)]

    assert shapes() == shapes(concurrency=2) != shapes(seed=1)


def test_failures_of_infrastructure_leave_n_members(world):
    sampler = EntropyTreeSampler(2, 2)
    groups, _, system = groups_of(world, sampler, always(2), 2, 6)
    dead = world.make(lambda ids, seed: system.engine.kill() or 1, sampler=sampler)
    system.engine = dead.engine
    for group in roll(dead, 2, 6):
        check_group(group, 6, dead)
        assert all(t.stop_reason is StopReason.INFRASTRUCTURE for t in group)


def test_a_group_without_room_is_refused(world):
    with pytest.raises(ValueError, match="a group has 6 trajectories, but 2 rounds of 3 expansions leave none"):
        groups_of(world, EntropyTreeSampler(2, 3), always(1), 1, 6)
