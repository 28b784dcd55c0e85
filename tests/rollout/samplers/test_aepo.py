"""AEPO: how many start from the prompt follows from a probe; forks in a row become less likely."""

import pytest

from rollout.samplers.branching import AEPOSampler
from tests.rollout.samplers.branching_world import SAMPLING, always, check_group, mixed, tasks


def groups_of(world, sampler, calls, n_tasks, n, **options):
    system = world.make(calls, sampler=sampler, **options)
    done = system.rollout(tasks(n_tasks), n=n, sampling=SAMPLING, seed=0)
    groups = [done[i : i + n] for i in range(0, len(done), n)]
    executed = sum(check_group(group, n, system) for group in groups)
    return groups, executed, system


@pytest.mark.parametrize(
    ("root", "results", "fixed", "published"),
    [
        ([3.0], [3.0], 8, 9),
        ([1.0], [2.0, 4.0], 4, 5),
        ([0.0], [999.0], 1, 1),
        ([999.0], [0.0], 16, 16),
        ([], [], 8, 9),
    ],
)
def test_roots_by_hand(root, results, fixed, published):
    assert AEPOSampler(8).roots(16, root, results) == fixed
    assert AEPOSampler(8, variant="lock_step").roots(16, root, results) == published


@pytest.mark.parametrize(
    ("change", "streak", "fixed", "published"),
    [
        (0.0, 0, 0.5, 0.5),
        (1.0, 0, 0.7, 0.7),
        (1.0, 2, 0.7 * 0.9, 1 - 0.5 / 0.9 + 0.2),
        (-1.0, 4, 0.3 * 0.8, 1 - 0.5 / 0.8 - 0.2),
        (9.0, 20, 0.0, 0.0),
        (-9.0, 0, 0.0, 0.0),
    ],
)
def test_penalty_by_hand(change, streak, fixed, published):
    assert AEPOSampler(8).probability(change, streak) == pytest.approx(fixed)
    assert AEPOSampler(8, variant="lock_step").probability(change, streak) == pytest.approx(published)


@pytest.mark.parametrize("variant", ["fixed", "lock_step"])
@pytest.mark.parametrize("calls", [always(0), always(2), mixed])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_exactly_n(world, variant, calls, n):
    groups, executed, system = groups_of(world, AEPOSampler(4, variant=variant), calls, 4, n)
    probes = 4 if variant == "lock_step" and n > 1 else 0
    assert executed <= len(system.retriever.queries) and (probes or executed == len(system.retriever.queries))
    if probes and calls is not mixed:  # the probe is sampled besides the group, and not handed out
        assert len(system.retriever.queries) - executed == probes * calls((), 0)


def test_entropy_of_the_probe_decides(world):
    """More certain after results than at the prompt: all start from the prompt; the other way round: one, its probe."""
    for before, after, roots in ((10, 1, 6), (1, 10, 1)):
        nats = world.nats(before, after)
        sampler = AEPOSampler(4, branch_probability=1.0, monitor_weight=50.0)
        groups, _, _ = groups_of(world, sampler, always(2), 2, 6, nats=nats)
        for group in groups:
            # Forks of the probe come first (at its two results), then forks of these; what no fork claimed starts anew.
            assert group[0].fork is None
            assert sum(t.fork is None for t in group[:roots]) == roots
            if roots == 1:
                assert [t.fork.parent for t in group[1:3]] == [0, 0]
                assert len({t.fork.at for t in group[1:3]}) == 2


def test_without_monitoring_it_is_arpo_with_a_penalty(world):
    """Penalty 1: after a fork none at the next result; so forks lie at the first and the third result only."""
    sampler = AEPOSampler(1, branch_probability=1.0, pre_monitoring=False, consecutive_penalty=1.0)
    [group], _, _ = groups_of(world, sampler, always(3), 1, 4)
    places = [sum(turn.end <= t.fork.at for turn in t.turns) for t in group if t.fork]
    assert sorted(places) == [1, 3, 3]
    assert [turn.branch_probability for turn in group[0].turns] == [None, 1.0, 0.0, 1.0]


def test_a_lock_step_round_that_adds_nothing_leaves_the_penalty(world):
    """The probability at the root's r-th result has as many penalties as earlier rounds had forks, in a row or not."""
    options = {"branch_probability": 0.7, "entropy_weight": 0.0, "variant": "lock_step"}
    sampler = AEPOSampler(1, pre_monitoring=False, consecutive_penalty=0.1, **options)
    groups, _, _ = groups_of(world, sampler, always(4), 8, 9)
    paused = 0
    for group in groups:
        first_tree = [i for i, t in enumerate(group) if not any(other.fork is None for other in group[1 : i + 1])]
        rounds = {sum(turn.end <= group[i].fork.at for turn in group[i].turns) for i in first_tree[1:]}
        for turn, said in enumerate(one.branch_probability for one in group[0].turns):
            if said is not None:
                grown = len([r for r in rounds if r < turn])
                assert said == pytest.approx(1 - 0.7 / (1 - 0.1 * grown))
                paused += grown > 0 and turn - 1 not in rounds
    assert paused > 2, "rounds without a fork after rounds with one"
