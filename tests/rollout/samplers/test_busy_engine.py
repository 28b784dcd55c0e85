"""The engine is never idle: nothing waits for what it does not need. In virtual time, so exact on any machine."""

import pytest

from rollout.samplers.base import IndependentSampler
from rollout.samplers.branching import BranchingSampler
from tests.rollout.samplers.branching_world import SAMPLING, always, tasks
from tests.rollout.scripted import ToyRetriever

TOOL_S = 0.05
ENGINE = {"prefill_s": 1e-5, "decode_s": 1e-3, "prefix_reuse": True}
SAMPLERS = {
    "independent": IndependentSampler(),
    "fixed": BranchingSampler(4, branch_probability=1.0),
    "lock_step": BranchingSampler(4, branch_probability=1.0, variant="lock_step"),
}


def tool(seconds=TOOL_S):
    return ToyRetriever(latency=seconds if callable(seconds) else lambda query: seconds)


def roll(system, n_tasks, n):
    return system.rollout(tasks(n_tasks), n=n, sampling=SAMPLING, seed=0)


@pytest.mark.parametrize("sampler", ["independent", "fixed"])
def test_sixteen_trajectories_take_as_long_as_the_longest(world, sampler):
    """Two tool turns of 50 ms. A branching group whose forks all come from running trajectories takes no longer."""
    whole = world.make(always(2), sampler=SAMPLERS[sampler], retriever=tool(), engine=ENGINE)
    assert len(roll(whole, 2, 8)) == 16
    alone = world.make(always(2), retriever=tool(), engine=ENGINE)
    roll(alone, 1, 1)
    assert 2 * TOOL_S < world.elapsed(alone) <= world.elapsed(whole) <= 1.3 * world.elapsed(alone)
    assert len(whole.retriever.queries) >= 8


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_prompt_with_a_slow_tool_holds_up_no_other(world, sampler):
    slow = [10.0]
    retriever = tool(lambda query: slow.pop() if slow and query == "Mira 0" else TOOL_S)
    system = world.make(always(2), sampler=SAMPLERS[sampler], retriever=retriever, engine=ENGINE)
    groups = [t.group for t in system.stream(tasks(4), n=8, sampling=SAMPLING, seed=0)]
    assert groups[-1] == "q0"
    assert max(time for time, number in world.arrivals(system) if number) < 1.0 < 10.0 < world.elapsed(system)


def test_the_next_prompts_start_as_soon_as_there_is_room(world):
    """Four at once, groups of four: prompt 0 waits for one slow search, prompts 1 and 2 are rolled out meanwhile."""
    slow = [10.0]
    retriever = tool(lambda query: slow.pop() if slow and query == "Mira 0" else TOOL_S)
    system = world.make(always(1), retriever=retriever, engine=ENGINE, concurrency=4)
    roll(system, 3, 4)
    first = {number: min(time for time, n in world.arrivals(system) if n == number) for number in range(3)}
    assert 0 < first[1] < first[2] < 1.0 < 10.0 < world.elapsed(system)
    assert system.engine.peak_concurrency == 4


def test_forks_come_before_the_prompts_behind(world):
    """Room for four: the two forks of each prompt's two roots begin before anything of the prompt after next."""
    sampler = BranchingSampler(2, branch_probability=1.0)
    system = world.make(always(1), sampler=sampler, retriever=tool(), engine=ENGINE, concurrency=4)
    done = roll(system, 6, 4)
    arrivals = world.arrivals(system)
    lengths = [len(request.token_ids) for request in system.engine.requests]
    for number in range(4):
        forks = [t for t in done if t.group == f"q{number}" and t.fork]
        begin = {len(t.prompt_ids) + t.fork.at for t in forks}
        begun = [time for (time, n), length in zip(arrivals, lengths, strict=True) if n == number and length in begin]
        assert len(forks) == 2 and len(begun) == 4  # the sources' own turns begin there as well
        assert max(begun) < min(time for time, n in arrivals if n == number + 2)


def first_fork_and_slow_return(world, variant):
    """When the first fork of a group samples its first token, and when the slower of its two roots has its result."""
    waits = [1.0, TOOL_S]
    returned = []

    class Noting(ToyRetriever):
        async def search(self, queries, k):
            found = await super().search(queries, k)
            returned.append(system._thread.loop.time())
            return found

    sampler = BranchingSampler(2, branch_probability=1.0, variant=variant)
    retriever = Noting(latency=lambda query: waits.pop() if waits else TOOL_S)
    system = world.make(always(1), sampler=sampler, retriever=retriever, engine=ENGINE)
    done = roll(system, 1, 4)
    at = next(t for t in done if t.fork).fork.at + len(done[0].prompt_ids)
    asked = zip(system.engine.times, system.engine.requests, strict=True)
    return min(time for time, request in asked if len(request.token_ids) == at), max(returned[:2])


def test_branching_has_no_barrier(world):
    """The fast root and its fork go on while the slow one waits; the released code waits for all."""
    fork, slow = first_fork_and_slow_return(world, "fixed")
    assert fork < 0.2 < 1.0 < slow
    fork, slow = first_fork_and_slow_return(world, "lock_step")
    assert fork >= slow > 1.0


def test_missing_members_start_at_once_or_one_per_round(world):
    """Two roots that call no tool, five members: one more stage, or three more rounds. A request takes 1 s."""
    for variant, seconds in (("fixed", 2), ("lock_step", 4)):
        sampler = BranchingSampler(2, first_tokens=200, variant=variant)
        system = world.make(always(0), sampler=sampler, engine={"latency": 1.0})
        roll(system, 1, 5)
        assert world.elapsed(system) == pytest.approx(seconds)


def test_missing_members_do_not_wait_for_a_trajectory_in_its_last_turn(world):
    """One root that may search once and never forks: as its last turn begins, the other member starts; where the
    entropy could have made it fork, after the look."""
    for weight, looked in ((0.0, 0.0), (1.0, 1.0)):
        check_start_of_the_other(world, weight, looked)


def check_start_of_the_other(world, weight, looked):
    sampler = BranchingSampler(1, branch_probability=0.0, entropy_weight=weight, first_tokens=2)
    options = {"retriever": tool(), "engine": {"latency": 1.0}, "nats": world.nats(1, 1)}
    system = world.make(always(9), sampler=sampler, max_turns=1, **options)
    first, second = roll(system, 1, 2)
    assert len(first.turns) == len(second.turns) == 2 and second.fork is None
    starts = [time for time, r in zip(system.engine.times, system.engine.requests, strict=True)
              if r.token_ids == first.prompt_ids]  # fmt: skip
    # Turn 1, which takes one request. Tool. Turn 2, its first tokens apart or not.
    assert starts == pytest.approx([0.0, 1.0 + TOOL_S + looked])
    assert world.elapsed(system) == pytest.approx(1.0 + TOOL_S + looked + 2.0 + TOOL_S)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_under_load_the_engine_hardly_waits(world, sampler):
    """16 prompts of 8, 8 sequences at once in the engine, 64 trajectories in flight, 50 ms per search."""
    engine = {**ENGINE, "slots": 8}
    system = world.make(always(2), sampler=SAMPLERS[sampler], retriever=tool(), engine=engine, concurrency=64)
    roll(system, 16, 8)
    assert 1 - system.engine.busy_s / world.elapsed(system) < 0.02


def test_forks_share_the_prefix(world):
    """Tokens computed: forks of running trajectories compute nothing anew of what they take over."""
    computed = {}
    for reuse in (True, False):
        sampler = BranchingSampler(2, branch_probability=1.0)
        system = world.make(always(2), sampler=sampler, retriever=tool(), engine={**ENGINE, "prefix_reuse": reuse})
        done = roll(system, 2, 4)
        computed[reuse] = sum(t.tokens_computed for t in done)
        whole = sum(len(r.token_ids) for r in system.engine.requests)
        own = sum(sum(t.loss_mask[t.fork.at if t.fork else 0 :]) for t in done)
        if not reuse:
            assert computed[reuse] == whole + own
            continue
        for t in done:
            new = len(t.response_ids) - t.fork.at if t.fork else len(t.response_ids)
            requests = 2 * len([turn for turn in t.turns if not t.fork or turn.start >= t.fork.at])
            # Each request computes its last given token; the first of all computes the whole prompt.
            assert new <= t.tokens_computed <= new + requests + (len(t.prompt_ids) if t.index == 0 else 0)
    assert computed[True] < 0.5 * computed[False]
