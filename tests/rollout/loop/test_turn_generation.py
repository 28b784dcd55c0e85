"""A turn that is looked at comes out as if it had not been; entropies are recorded where they are asked for."""

import asyncio
import dataclasses
import math

import pytest

from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.samplers.base import NO_HOOKS, EntropyProbe, Hooks
from rollout.tools.search import SearchTool
from rollout.trajectory import ActionKind, StopReason
from tests.rollout.scripted import ENGINE_DEAD, TASK, ToyRetriever, in_turn, search_then_answer
from tests.rollout.scripted_engine import ScriptedEngine

SAMPLING = SamplingParams(max_new_tokens=500)


def make_loop(protocol, script, top=None, entropy_tokens=0, **budgets):
    def reply(ids, sampling):
        return script(protocol.decode(ids), sampling.seed)

    engine = ScriptedEngine(reply, protocol.tokenizer, top=top)
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    return AgentLoop(engine, protocol, environment, Budgets(**budgets), entropy_tokens=entropy_tokens)


def run(loop, hooks=NO_HOOKS, **options):
    async def started():
        await loop.engine.start()
        return await loop.run(TASK, group="q1", index=0, request=Request(7, SAMPLING, hooks=hooks), **options)

    return asyncio.run(started())


def looking(k, seen=None):
    async def on_first_tokens(state, opening):
        if seen is not None:
            seen.append((len(state.turns), len(state.response_ids), opening))

    return Hooks(k, 10, on_first_tokens=on_first_tokens)


def content(trajectory):
    """All but what a look adds: durations, entropies, and the requests that computed it."""
    turns = tuple(dataclasses.replace(turn, entropy=None) for turn in trajectory.turns)
    return trajectory.replace(seconds=0.0, calls=(), tokens_computed=None, turns=turns)


@pytest.mark.parametrize("k", [*range(1, 34), 500])
def test_a_look_changes_nothing(protocol, k):
    """k runs over every place in both turns, so also through the middle of "</search>" and "</answer>"."""
    plain = run(make_loop(protocol, search_then_answer))
    seen = []
    looked = run(make_loop(protocol, search_then_answer), looking(k, seen))
    assert content(looked) == content(plain)
    assert [call.request for call in looked.calls] == [call.request for call in plain.calls]
    for turn, (number, length, opening) in enumerate(seen):
        assert (number, length) == (turn, plain.turns[turn].start)  # the state ends where the turn begins
        assert opening.token_ids == plain.response_ids[length:][: min(k, plain.turns[turn].end - length)]
        assert len(opening.top_logprobs) == len(opening.token_ids)


@pytest.mark.parametrize("budget", ["max_turn_tokens", "max_response_tokens"])
@pytest.mark.parametrize("tokens", range(1, 40, 4))
def test_a_look_changes_no_budget(protocol, budget, tokens):
    for k in (1, 4, 5, 9):
        plain = run(make_loop(protocol, search_then_answer, **{budget: tokens}))
        looked = run(make_loop(protocol, search_then_answer, **{budget: tokens}), looking(k))
        assert content(looked) == content(plain)


def test_a_look_is_one_more_request_with_a_seed_of_its_own(protocol):
    def requests(watch):
        loop = make_loop(protocol, search_then_answer)
        trajectory = run(loop, watch)
        return loop.engine.requests, trajectory

    plain, _ = requests(Hooks())
    assert [r.sampling.top_logprobs for r in plain] == [0, 0]
    looked, trajectory = requests(looking(4))
    assert [r.sampling.top_logprobs for r in looked] == [10, 0, 10, 0]
    assert [r.sampling.max_new_tokens for r in looked] == [4, 496, 4, 496]
    assert [looked[0].sampling.seed, looked[2].sampling.seed] == [r.sampling.seed for r in plain]
    assert len({r.sampling.seed for r in looked}) == 4
    assert [r.sampling.seed for r in requests(looking(4))[0]] == [r.sampling.seed for r in looked]
    assert looked[1].token_ids == looked[0].token_ids + trajectory.response_ids[:4]
    given = sum(len(r.token_ids) for r in looked)
    assert trajectory.tokens_computed == given + sum(trajectory.loss_mask)  # this engine caches nothing
    assert len(requests(Hooks(4, 10))[0]) == 2  # nobody to call: nothing to split for


def test_a_sampler_chooses_how_to_look_at_each_turn(protocol):
    """Not at all, or once the whole turn is there: one request either way."""
    looks, seen = [EntropyProbe.WITH_TURN, EntropyProbe.NONE], []

    async def on_first_tokens(state, generation):
        seen.append((len(state.turns), len(state.response_ids), generation.token_ids))

    plain = run(make_loop(protocol, search_then_answer))
    loop = make_loop(protocol, search_then_answer)
    looked = run(loop, Hooks(4, 10, probe=lambda state: looks.pop(0), on_first_tokens=on_first_tokens))
    assert content(looked) == content(plain)
    assert seen == [(0, 0, plain.response_ids[: plain.turns[0].end])]
    assert [turn.entropy is None for turn in looked.turns] == [False, True]
    assert [r.sampling.top_logprobs for r in loop.engine.requests] == [10, 0]


def test_an_engine_that_dies_after_the_look_leaves_what_was_sampled(protocol):
    first = "<think> birthplace </think>\n<search> Mira </search>"
    loop = make_loop(protocol, in_turn(first))

    async def kill(state, opening):
        loop.engine.kill()

    trajectory = run(loop, Hooks(3, 10, on_first_tokens=kill))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and len(trajectory.response_ids) == 3
    [turn] = trajectory.turns
    assert (turn.start, turn.end, turn.action.kind) == (0, 3, ActionKind.INVALID) and turn.entropy is not None
    loop = make_loop(protocol, in_turn(first, ENGINE_DEAD))
    assert len(run(loop, looking(3)).turns) == 1


def test_entropies_are_those_of_the_first_tokens(protocol):
    """The first token of each turn is one of 4, the second of 2, the others are certain."""
    prompt = len(protocol.prompt_ids(TASK))
    plain = run(make_loop(protocol, search_then_answer))
    starts = [prompt + turn.start for turn in plain.turns]

    def top(ids):
        likely = {starts[0]: 4, starts[0] + 1: 2, starts[1]: 2}.get(len(ids), 1)
        return {token: -math.log(likely) for token in range(likely)}

    for k, first, second in ((1, math.log(4), math.log(2)), (2, math.log(8) / 2, math.log(2) / 2)):
        looked = run(make_loop(protocol, search_then_answer, top), looking(k))
        recorded = run(make_loop(protocol, search_then_answer, top, entropy_tokens=k))
        both = run(make_loop(protocol, search_then_answer, top, entropy_tokens=9), Hooks(k, 10))
        for trajectory in (looked, recorded, both):
            assert [turn.entropy for turn in trajectory.turns] == pytest.approx([first, second])
    assert [turn.entropy for turn in plain.turns] == [None, None]


def test_the_last_turn_is_known_before_it_is_sampled(protocol):
    last = []

    async def on_first_tokens(state, opening):
        last.append(state.last_turn)

    def searching(context, seed):
        return "<search> Mira </search>"

    for final_turn, expected in ((True, [False, False, True]), (False, [False, True])):
        last.clear()
        loop = make_loop(protocol, searching, max_turns=2, final_turn=final_turn)
        assert run(loop, Hooks(2, 1, on_first_tokens=on_first_tokens)).stop_reason is StopReason.MAX_TURNS
        assert last == expected


def test_what_follows_a_result_is_announced(protocol):
    seen = []

    async def on_result(state):
        seen.append((len(state.turns), state.response_ids[-1], state.loss_mask[-1]))

    trajectory = run(make_loop(protocol, search_then_answer), Hooks(on_result=on_result))
    assert seen == [(1, trajectory.response_ids[trajectory.turns[1].start - 1], 0)]
