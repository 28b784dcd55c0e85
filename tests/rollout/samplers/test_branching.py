"""ARPO's sampler: who forks, from where, with what, and that every group has n members."""

import math
from collections import Counter

import pytest

from rollout.protocols.base import PromptMode
from rollout.samplers.base import EntropyProbe, IndependentSampler
from rollout.samplers.branching import AEPOSampler, BranchingSampler, FreeTree
from rollout.tools.limits import ToolLimits
from rollout.trajectory import StopReason
from tests.rollout.samplers.branching_world import SAMPLING, always, check_group, mixed, tasks
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import fingerprint

VARIANTS = ["fixed", "lock_step"]


def roll(system, n_tasks, n, seed=0, **options):
    done = system.rollout(tasks(n_tasks), n=n, sampling=SAMPLING, seed=seed, **options)
    return [done[i : i + n] for i in range(0, len(done), n)]


def groups_of(world, sampler, calls, n_tasks=3, n=8, seed=0, **options):
    """Checked groups, and the number of searches that were executed."""
    system = world.make(calls, sampler=sampler, **options)
    groups = roll(system, n_tasks, n, seed)
    assert len(groups) == n_tasks
    executed = sum(check_group(group, n, system) for group in groups)
    return groups, executed, system


def shape(group):
    return sorted((t.response_ids, t.fork is not None and t.fork.at) for t in group)


def decided(group):
    """Responses, where they were forked off, and with what probabilities they might have been."""
    probabilities = [tuple(turn.branch_probability for turn in t.turns) for t in group]
    return Counter((t.response_ids, t.fork and t.fork.at, p) for t, p in zip(group, probabilities, strict=True))


@pytest.mark.parametrize(("change", "expected"), [(0, 0.5), (1, 0.7), (-5, 0.0), (0.25, 0.55)])
def test_probability(change, expected):
    for variant in VARIANTS:
        assert BranchingSampler(8, variant=variant).probability(change) == pytest.approx(expected)
    assert BranchingSampler(8, entropy_weight=0.0).probability(change) == 0.5


def test_every_result_is_compared_with_the_first_turn_not_with_the_turn_before(world):
    """Entropies 0, ln 4, ln 4, ln 4 nats: the change is the same at each of three results, for roots and forks."""
    nats = world.nats(1, 4)
    groups, _, system = groups_of(world, BranchingSampler(2, entropy_weight=0.05), always(3), 6, 6, nats=nats)
    expected = 0.5 + 0.05 * 20 * math.log(4) / math.log(len(system.protocol.tokenizer))
    by_turn = {place: set() for place in (1, 2, 3)}
    for trajectory in (t for group in groups for t in group):
        assert trajectory.turns[0].branch_probability is None
        for place in by_turn:
            if trajectory.turns[place].branch_probability is not None:
                by_turn[place].add(round(trajectory.turns[place].branch_probability, 9))
    assert all(values == {round(expected, 9)} for values in by_turn.values()), by_turn


@pytest.mark.parametrize(
    ("before", "after", "weight"),
    [
        (1, 4, 0.05),
        (1, 10, 0.2),
        (1, 10, 0.0),
    ],  # the 4th and 5th: dH = +-7.7
)
def test_forks_are_as_frequent_as_they_should_be(world, before, after, weight):
    """One root, one search, room for one fork: it comes with the probability of the formula, else a second root."""
    prompts = 120
    sampler = BranchingSampler(1, entropy_weight=weight)
    nats = world.nats(before, after)
    groups, executed, system = groups_of(world, sampler, always(1), prompts, 2, nats=nats)
    change = 20 * (math.log(after) - math.log(before)) / math.log(len(system.protocol.tokenizer))
    expected = min(max(0.5 + weight * change, 0.0), 1.0)
    forks = sum(group[1].fork is not None for group in groups)
    assert abs(forks - prompts * expected) <= 4 * math.sqrt(prompts * expected * (1 - expected))
    assert executed == 2 * prompts - forks
    for root, other in groups:
        assert [turn.branch_probability for turn in root.turns] == pytest.approx([None, expected])
        assert [turn.branch_probability for turn in other.turns] == [None, None]
        assert [turn.entropy for turn in root.turns] == pytest.approx([math.log(before), math.log(after)])


def test_lock_step_measures_the_turn_before_the_result(world):
    """So the first decision is always at tau; the second compares the second turn with the first."""
    nats = world.nats(1, 10)
    sampler = BranchingSampler(1, variant="lock_step", entropy_weight=0.05)
    groups, _, system = groups_of(world, sampler, always(2), 50, 2, nats=nats)
    change = 20 * math.log(10) / math.log(len(system.protocol.tokenizer))
    seen = {tuple(turn.branch_probability for turn in group[0].turns) for group in groups}
    assert {s[:2] for s in seen} == {(None, 0.5)}
    [second] = {s[2] for s in seen if s[2] is not None}
    assert second == pytest.approx(0.5 + 0.05 * change)
    forks = [group[1] for group in groups if group[1].fork is not None]
    assert {sum(turn.end <= t.fork.at for turn in t.turns) for t in forks} == {1, 2}  # at either result


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("calls", "options"),
    [
        (always(0), {}),
        (always(-1), {"max_turns": 2}),
        (always(1), {}),
        (always(3), {}),
        (always(9), {"max_turns": 2}),
        (always(9), {"max_turns": 2, "final_turn": False}),
        (always(9), {"limits": ToolLimits(max_calls=1, retries=0)}),
        (always(2), {"broken": "Mira"}),
        (always(2), {"max_response_tokens": 70}),
        (always(2), {"concurrency": 1}),
        (always(2), {"max_turn_tokens": 3}),
        (mixed, {"latency": lambda query: 0.01, "concurrency": 5}),
    ],
)
@pytest.mark.parametrize(("n", "roots", "beam"), [(8, 4, 2), (5, 1, 4), (4, 4, 2), (3, 8, 2), (1, 1, 2), (6, 3, 1)])
def test_exactly_n_in_every_case(world, variant, calls, options, n, roots, beam):
    sampler = BranchingSampler(roots, beam_size=beam, branch_probability=0.8, variant=variant)
    retriever = ToyRetriever(options.get("latency", lambda query: 0.0), options.get("broken"))
    options = {name: value for name, value in options.items() if name not in ("latency", "broken")}
    groups, executed, _ = groups_of(world, sampler, calls, 2, n, retriever=retriever, **options)
    assert executed == (0 if retriever.broken else len(retriever.queries))
    for group in groups:
        assert sum(t.fork is None for t in group) >= min(roots, n)


@pytest.mark.parametrize("variant", VARIANTS)
def test_failures_of_infrastructure_leave_n_members(world, variant):
    sampler = BranchingSampler(4, branch_probability=1.0, variant=variant)
    groups, _, system = groups_of(world, sampler, always(2), 3, 8)
    assert not any(t.left_out for group in groups for t in group)
    dead = world.make(lambda ids, seed: system.engine.kill() or 1, sampler=sampler)
    system.engine = dead.engine
    for group in roll(dead, 3, 8):
        check_group(group, 8, dead)
        assert all(t.stop_reason is StopReason.INFRASTRUCTURE for t in group)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forks_of_forks_and_what_they_inherit(world, variant):
    """With tau = 1 everything forks: one root, a fork at its first result, two at their second ones."""
    sampler = BranchingSampler(1, branch_probability=1.0, variant=variant)
    [group], executed, system = groups_of(world, sampler, always(3), 1, 8)
    parents = {t.index: t.fork.parent for t in group if t.fork}
    assert any(parent in parents for parent in parents.values()) and len(parents) == 7
    assert executed == 1 + 2 + 4 and len(system.retriever.queries) == 7
    assert all(len(t.executed_calls) == 3 for t in group)  # inherited ones count
    assert len({t.response_ids for t in group}) == 8


def test_inherited_calls_count_against_the_limit(world):
    sampler = BranchingSampler(1, branch_probability=1.0)
    [group], _, _ = groups_of(world, sampler, always(9), 1, 4, limits=ToolLimits(max_calls=2, retries=0))
    assert all(len(t.executed_calls) == 2 for t in group)


def test_the_source_keeps_the_tokens_that_were_looked_at(world):
    sampler = BranchingSampler(2, branch_probability=1.0)
    forked, _, _ = groups_of(world, sampler, always(2), 2, 6)
    alone, _, _ = groups_of(world, BranchingSampler(2, branch_probability=0.0), always(2), 2, 6)
    for with_forks, without in zip(forked, alone, strict=True):
        assert [t.response_ids for t in with_forks[:2]] == [t.response_ids for t in without[:2]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_all_from_the_prompt_it_is_the_independent_sampler(world, variant):
    systems = [world.make(mixed, sampler=s) for s in (IndependentSampler(), BranchingSampler(6, variant=variant))]
    (ours, theirs) = ([t.replace(seconds=0.0) for g in roll(s, 4, 6) for t in g] for s in systems)
    assert [(t.response_ids, t.turns, t.index, t.group, t.fork, t.tokens_computed) for t in ours] == [
        (t.response_ids, t.turns, t.index, t.group, t.fork, t.tokens_computed) for t in theirs
    ]
    requests = [system.engine.requests for system in systems]
    asked = [sorted((r.token_ids, r.sampling.seed, r.sampling.top_logprobs) for r in some) for some in requests]
    assert asked[0] == asked[1]  # no look, no log-probs


def test_hardly_more_requests_than_turns(world):
    """A turn's first tokens are a request of their own only where their entropy decides."""
    groups, _, system = groups_of(world, BranchingSampler(8), always(3), 4, 16, nats=world.nats(1, 1))
    own = sum(turn.start >= (t.fork.at if t.fork else 0) for group in groups for t in group for turn in t.turns)
    assert own < len(system.engine.requests) <= 1.3 * own


@pytest.mark.parametrize("weight", [0.2, -0.2, 0.0])
@pytest.mark.parametrize("sampler", [BranchingSampler, AEPOSampler])
def test_forks_are_those_of_a_sampler_that_always_looks(world, monkeypatch, sampler, weight):
    """In groups with room for all forks; who gets the last rows of others depends on the order of arrival."""

    def nats(ids):
        return 1 + fingerprint((world.number(ids), world.results(ids))) % 5

    rule = sampler(3, branch_probability=0.25, entropy_weight=weight)
    spared, _, some = groups_of(world, rule, mixed, 12, 12, nats=nats)
    monkeypatch.setattr(FreeTree, "_probe", lambda self, state: EntropyProbe.BEFORE_THE_REST)
    always_looking, _, all_turns = groups_of(world, rule, mixed, 12, 12, nats=nats)
    roomy = [i for i, group in enumerate(always_looking) if sum(t.fork is not None for t in group) < 9]
    assert sum(any(t.fork for t in always_looking[i]) for i in roomy) >= 4
    for i in roomy:
        assert decided(spared[i]) == decided(always_looking[i])
    assert len(some.engine.requests) < len(all_turns.engine.requests)


def test_probes_and_evaluations_are_independent(world):
    system = world.make(always(1), sampler=BranchingSampler(1, branch_probability=1.0))
    assert not any(t.fork for g in roll(system, 2, 4, mode=PromptMode.CLOSED_BOOK) for t in g)
    assert not any(t.fork for g in roll(system, 2, 4, sampler=IndependentSampler()) for t in g)
    assert any(t.fork for g in roll(system, 2, 4) for t in g)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_seed_one_group_whatever_is_slow(world, variant):
    """With room for every fork that is wanted, only the forks' numbers depend on the order of arrival (fixed), or
    nothing does (lock_step)."""

    def slow(salt):
        return {"latency": lambda ids: 0.001 * (fingerprint((*ids, salt)) % 50)}

    sampler = BranchingSampler(3, variant=variant, branch_probability=0.25 if variant == "fixed" else 0.5)
    runs = [groups_of(world, sampler, mixed, 5, 9, seed=3, engine=slow(salt))[0] for salt in (1, 1, 2)]
    if variant == "fixed":
        roomy = [i for i, group in enumerate(runs[0]) if sum(t.fork is not None for t in group) < 6]
        assert len(roomy) >= 3 and any(t.fork for i in roomy for t in runs[0][i])
        assert [shape(runs[2][i]) for i in roomy] == [shape(runs[0][i]) for i in roomy]
    else:
        assert [[(t.response_ids, t.fork) for t in g] for g in runs[2]] == [
            [(t.response_ids, t.fork) for t in g] for g in runs[0]
        ]
    assert [[t.response_ids for t in g] for g in runs[1]] == [[t.response_ids for t in g] for g in runs[0]]
    other = groups_of(world, sampler, mixed, 5, 9, seed=4)[0]
    assert [shape(g) for g in other] != [shape(g) for g in runs[0]]
