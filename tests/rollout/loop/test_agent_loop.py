"""One trajectory at a time: what is sampled, what is appended, where it ends."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest
import torch

from rollout.engines.base import EngineGone, SamplingParams
from rollout.environments.base import FirstObservation, StepResult
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.protocols.base import FIRST_OBSERVATION, PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.samplers.base import NO_HOOKS
from rollout.skills.bank import Selection
from rollout.skills.injection import Injection, Skills
from rollout.storage import load_trajectories, save_trajectories
from rollout.tools.limits import ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import (
    ActionKind,
    CallOutcome,
    Document,
    Fork,
    Reward,
    RewardError,
    StopReason,
    ToolResult,
)
from tests.rollout import virtual_time
from tests.rollout.scripted import ENGINE_DEAD, EOS, TASK, TextEngine, ToyRetriever, in_turn, search_then_answer

NO_RETRIES = ToolLimits(retries=0)
SAMPLING = SamplingParams(max_new_tokens=500)


def make_loop(protocol, script, retriever=None, limits=NO_RETRIES, max_calls=None, **budgets):
    engine = TextEngine(protocol, script)
    tools = {"search": SearchTool(retriever or ToyRetriever(), topk=2)}
    environment = QuestionAnswering(tools, limits, max_calls=max_calls)
    return AgentLoop(engine, protocol, environment, Budgets(**budgets))


def run(loop, task=TASK, mode=PromptMode.AGENT, seed=0, index=0, runner=asyncio.run, **options):
    request = Request(seed, SAMPLING, mode, options.pop("hooks", NO_HOOKS))

    async def started():
        await loop.engine.start()
        return await loop.run(task, group=task.id, index=index, request=request, **options)

    return runner(started())


def test_golden_masks(protocol):
    """The picture of rollout/trajectory.py with real text: 1 = sampled, 0 = written by the environment."""
    trajectory = run(make_loop(protocol, search_then_answer))
    expected = [
        (1, "<think> birthplace </think>\n<search> Mira Voss birthplace </search>"),
        (0, '\n\n<information>Doc 1(Title: "Mira Voss") The birthplace of Mira Voss is Grey Harbor.\n'
            'Doc 2(Title: "Mira Vass") Mira Vass was born in Oldfield.</information>\n\n'),
        (1, "<think> Grey Harbor </think>\n<answer> Grey Harbor </answer>"),
    ]  # fmt: skip
    spans = []
    for token_id, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True):
        if not spans or spans[-1][0] != mask:
            spans.append((mask, []))
        spans[-1][1].append(token_id)
    assert [(mask, protocol.decode(ids)) for mask, ids in spans] == expected
    assert protocol.decode(trajectory.prompt_ids) == (
        f"<|im_start|>user\nQuestion: {TASK.question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "Grey Harbor")
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "stop"]
    [call] = trajectory.calls
    assert (call.turn, call.request.arguments) == (0, {"query": "Mira Voss birthplace"})
    assert [document.id for document in call.result.documents] == ["d1", "d2"]


def test_ids_are_exactly_those_of_the_engine(protocol):
    loop = make_loop(protocol, search_then_answer)
    trajectory = run(loop)
    first, second = loop.engine.requests
    assert first.token_ids == trajectory.prompt_ids
    assert second.token_ids == trajectory.prompt_ids + trajectory.response_ids[: trajectory.turns[1].start]
    assert trajectory.logprobs == tuple(-0.5 * mask for mask in trajectory.loss_mask)  # the scripted engine's, and 0.0
    # nothing was cached by this engine: each turn computed its whole context and what it sampled
    assert trajectory.tokens_computed == sum(len(trajectory.prompt_ids) + turn.end for turn in trajectory.turns)


def test_text_after_the_stop_string_in_the_same_token_is_kept(protocol):
    tokenizer = protocol.tokenizer
    [token] = [i for t, i in tokenizer.get_vocab().items() if t == ">ĊĊ"]  # ">\n\n" is one token here
    loop = make_loop(protocol, in_turn("<answer> Grey Harbor </answer>\n\n<search> more"))
    trajectory = run(loop)
    assert trajectory.response_ids[-1] == token
    assert protocol.decode(trajectory.response_ids) == "<answer> Grey Harbor </answer>\n\n"
    assert trajectory.answer == "Grey Harbor"


def test_invalid_turn_reads_the_correction_and_goes_on(protocol):
    trajectory = run(make_loop(protocol, in_turn(f"I do not know.{EOS}", "<answer> Oldfield </answer>")))
    first, second = trajectory.turns
    assert (first.action.kind, first.finish_reason) == (ActionKind.INVALID, "eos")
    assert protocol.decode(trajectory.response_ids[first.end : first.observation_end]) == protocol.correction
    assert protocol.decode(trajectory.response_ids[first.start : first.end]).endswith(EOS)  # sampled, so it stays
    assert (trajectory.stop_reason, trajectory.answer, trajectory.calls) == (StopReason.ANSWER, "Oldfield", ())
    assert second.start == first.observation_end


def test_eos_ends_when_told_so(model_dir):
    protocol = SearchR1Protocol(str(model_dir), template="short", eos_ends=True)
    trajectory = run(make_loop(protocol, in_turn(f"I do not know.{EOS}")))
    assert (trajectory.stop_reason, trajectory.answer, len(trajectory.turns)) == (StopReason.EOS, None, 1)


def test_four_turns_that_search_and_a_last_one_that_may_not(protocol):
    retriever = ToyRetriever()
    trajectory = run(make_loop(protocol, lambda context, seed: "<search> Mira </search>", retriever, max_turns=4))
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 5 and len(retriever.queries) == 4 == len(trajectory.executed_calls)
    assert [call.result.outcome for call in trajectory.calls] == [CallOutcome.OK] * 4 + [CallOutcome.REFUSED]
    assert not trajectory.calls[-1].declined, "nobody was asked for it"
    assert trajectory.turns[-1].observation_end == trajectory.turns[-1].end == len(trajectory.response_ids)


def test_as_released_an_eos_that_nobody_sampled_is_trained_after_the_call_beyond_the_limit(protocol):
    def of(limit_eos):
        return run(make_loop(protocol, lambda c, s: "<search> Mira </search>", max_turns=2, limit_eos=limit_eos))

    mended, released = of(False), of(True)
    assert released.response_ids == (*mended.response_ids, protocol.tokenizer.eos_token_id)
    assert released.loss_mask == (*mended.loss_mask, 1) and released.logprobs == (*mended.logprobs, 0.0)
    assert released.turns[-1].end == released.turns[-1].observation_end == len(released.response_ids)
    within = run(make_loop(protocol, search_then_answer, max_turns=2, limit_eos=True))
    assert within.response_ids == run(make_loop(protocol, search_then_answer, max_turns=2)).response_ids


def test_call_limit_refuses_and_says_so(protocol):
    script = in_turn("<search> Mira </search>", "<search> Mira </search>", "<answer> Grey Harbor </answer>")
    trajectory = run(make_loop(protocol, script, limits=ToolLimits(max_calls=1)))
    assert [call.result.outcome for call in trajectory.calls] == [CallOutcome.OK, CallOutcome.REFUSED]
    assert [call.declined for call in trajectory.calls] == [False, True]
    second = trajectory.turns[1]
    observation = protocol.decode(trajectory.response_ids[second.end : second.observation_end])
    assert observation == "\n\n<information>No further call of search is allowed (limit: 1).</information>\n\n"


@pytest.mark.parametrize("mode", [PromptMode.CLOSED_BOOK, PromptMode.GOLD_THINK])
def test_search_is_disabled_in_the_probes(protocol, mode):
    retriever = ToyRetriever()
    script = in_turn("<search> Mira </search>", "<answer> x </answer>")
    trajectory = run(make_loop(protocol, script, retriever), mode=mode)
    assert [call.result.outcome for call in trajectory.calls] == [CallOutcome.REFUSED] and not retriever.queries
    assert trajectory.stop_reason is StopReason.ANSWER


def test_gold_direct_reads_one_turn_as_the_answer(protocol):
    loop = make_loop(protocol, in_turn(" Grey Harbor </answer>"))
    trajectory = run(loop, mode=PromptMode.GOLD_DIRECT)
    assert (trajectory.answer, trajectory.stop_reason) == ("Grey Harbor", StopReason.ANSWER)
    assert protocol.decode(trajectory.prompt_ids).endswith("Grey Harbor.</information>\n\n<answer>")
    missed = run(make_loop(protocol, in_turn(f" Grey Harbor{EOS}")), mode=PromptMode.GOLD_DIRECT)
    assert (missed.answer, missed.stop_reason, len(missed.turns)) == (None, StopReason.MAX_TURNS, 1)


@pytest.mark.parametrize("max_response_tokens", range(1, 110, 3))
def test_response_budget_is_never_exceeded(protocol, max_response_tokens):
    trajectory = run(make_loop(protocol, search_then_answer, max_response_tokens=max_response_tokens))
    assert 0 < len(trajectory.response_ids) <= max_response_tokens
    if trajectory.stop_reason is StopReason.LENGTH:
        assert trajectory.answer is None
    else:
        assert trajectory.answer == "Grey Harbor"
    for turn in trajectory.turns:
        if turn.observation_end > turn.end:
            observation = protocol.decode(trajectory.response_ids[turn.end : turn.observation_end])
            assert observation.startswith("\n\n<information>") and observation.endswith("</information>\n\n")
            assert turn.observation_end < len(trajectory.response_ids)  # something was sampled after it


def test_engine_limit_counts_prompt_and_response(protocol):
    prompt = len(protocol.prompt_ids(TASK))
    loop = make_loop(protocol, search_then_answer, max_length=prompt + 30)
    trajectory = run(loop)
    assert trajectory.stop_reason is StopReason.LENGTH and trajectory.prompt_ids == tuple(protocol.prompt_ids(TASK))
    assert all(len(r.token_ids) + r.sampling.max_new_tokens <= prompt + 30 for r in loop.engine.requests)
    too_long = make_loop(protocol, search_then_answer, max_length=prompt)
    trajectory = run(too_long)
    assert (trajectory.stop_reason, trajectory.response_ids) == (StopReason.LENGTH, ()) and not too_long.engine.requests


def test_observation_budget_cuts_documents_and_is_flagged(protocol):
    trajectory = run(make_loop(protocol, search_then_answer, max_observation_tokens=40))
    first = trajectory.turns[0]
    assert first.observation_truncated and first.observation_end - first.end <= 40
    observation = protocol.decode(trajectory.response_ids[first.end : first.observation_end])
    assert observation.startswith("\n\n<information>Doc 1(Title") and observation.endswith("</information>\n\n")


def test_retriever_failure_marks_the_trajectory_and_keeps_what_was_sampled(protocol):
    loop = make_loop(protocol, search_then_answer, ToyRetriever(broken="Mira"))
    trajectory = run(loop)
    assert trajectory.left_out and trajectory.reward is None
    assert protocol.decode(trajectory.response_ids).endswith("</search>") and len(trajectory.turns) == 1
    [call] = trajectory.calls
    assert call.result.outcome is CallOutcome.INFRASTRUCTURE and "connection refused" in call.result.detail
    assert trajectory.executed_calls == () and "connection refused" in loop.failures[0]


def test_engine_failure_keeps_the_turns_before(protocol):
    trajectory = run(make_loop(protocol, in_turn("<search> Mira </search>", ENGINE_DEAD)))
    assert trajectory.left_out and len(trajectory.turns) == 1
    assert trajectory.turns[0].observation_end == len(trajectory.response_ids) > trajectory.turns[0].end


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), EngineGone("for good")], ids=repr)
def test_what_ends_the_run_is_raised_not_recorded(protocol, error):
    with pytest.raises(type(error), match=str(error)):
        run(make_loop(protocol, in_turn(error)))


def test_cancelling_cancels_the_tool_and_closes_the_environment(protocol):
    retriever = ToyRetriever(latency=lambda query: 36000.0)
    loop = make_loop(protocol, search_then_answer, retriever)
    closed = []
    make_environment = loop.environment

    def watched(task, *, tools_enabled=True):
        environment = make_environment(task, tools_enabled=tools_enabled)

        async def close():
            closed.append(task.id)

        environment.close = close
        return environment

    loop.environment = watched

    async def cancel_soon():
        await loop.engine.start()
        work = asyncio.create_task(loop.run(TASK, group="q1", index=0, request=Request(0, SAMPLING)))
        while not retriever.queries:
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancel_soon())
    assert retriever.cancelled == ["Mira Voss birthplace"] and closed == ["q1"]


def test_an_environment_that_hangs_costs_its_trajectory(protocol):
    retriever = ToyRetriever(latency=lambda query: 1000.0)
    loop = make_loop(protocol, search_then_answer, retriever, step_timeout_s=0.2)
    trajectory = run(loop, runner=virtual_time.run)
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and len(trajectory.turns) == 1
    assert "did not answer an action within 0.2 s (rollouts.step_timeout_s)" in loop.failures[-1]
    assert retriever.cancelled == ["Mira Voss birthplace"]


RESULT = ToolResult("x", CallOutcome.OK)


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        ("reset", ZeroDivisionError("no\nworld"), "Own.reset raised ZeroDivisionError: no world"),
        ("reset", "a text", "Own.reset returned str; expected rollout.environments.base.FirstObservation | None"),
        ("step", SystemExit("over"), "Own.step raised SystemExit: over"),
        ("step", None, "Own.step returned NoneType; expected StepResult"),
        ("step", StepResult((), ()), "Own.step returned 0 results and 0 latencies for 1 calls; expected one of each"),
        ("close", KeyError("gone"), "Own.close raised KeyError: 'gone'"),
    ],
)
def test_an_environment_that_fails_by_itself_costs_its_trajectory(protocol, method, does, message):
    class Own:
        async def reset(self):
            return None

        async def step(self, action):
            return StepResult(("found",) * len(action.calls), (0.0,) * len(action.calls), done=True)

        async def close(self):
            pass

    async def act(self, *arguments):
        if isinstance(does, BaseException):
            raise does
        return does

    loop = make_loop(protocol, search_then_answer)
    loop.environment = lambda task, *, tools_enabled=True: Own()
    assert run(loop).calls[0].result == ToolResult("found", CallOutcome.OK), "a text is a result"
    setattr(Own, method, act)
    trajectory = run(loop)
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert loop.failures[-1].startswith(message) and "\n" not in loop.failures[-1]


def test_a_factory_that_raises_costs_its_trajectory(protocol):
    class Own:
        def __init__(self, task, *, tools_enabled=True):
            raise KeyError("no\nworld")

    loop = make_loop(protocol, search_then_answer)
    loop.environment = Own
    trajectory = run(loop)
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and trajectory.prompt_ids == ()
    assert loop.failures[-1] == "Own raised KeyError: 'no\\nworld' when it made an environment"


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"at": (1, np.float32(0.5)), "seen": np.array([[1], [2]])}, {"at": [1, 0.5], "seen": [[1], [2]]}),
        ({"loss": torch.tensor(0.5), "n": np.int64(3), "ok": np.bool_(True)}, {"loss": 0.5, "n": 3, "ok": True}),
        ({"a": [{"b": object()}]}, "info['a'][0]['b'] is object; expected plain JSON"),
        ({"a": math.nan}, "info['a'] is nan; expected a finite number"),
    ],
)
@pytest.mark.parametrize("place", ["reset", "step"])
def test_facts_of_an_environment_are_plain_json_when_they_come(protocol, tmp_path, place, given, stored):
    """They could not be saved with the trajectories, at the end of the iteration."""

    class Own(Corridor):
        async def reset(self):
            return FirstObservation("a corridor", info=given if place == "reset" else {})

        async def step(self, action):
            result = ToolResult("a door", CallOutcome.OK, info=given if place == "step" else {})
            return StepResult(
                (result,) * len(action.calls), (np.float32(0.5),) * len(action.calls), done=True, reward=1.0
            )

    loop = make_loop(protocol, search_then_answer)
    loop.environment = Own
    trajectory = run(loop)
    if isinstance(stored, str):
        assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and stored in loop.failures[-1]
        assert loop.failures[-1].startswith(f"Own.{place} raised ")
        return
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE, list(loop.failures)
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    [read] = load_trajectories(tmp_path / "t.parquet")
    assert read == trajectory
    found = read.task.metadata[FIRST_OBSERVATION] if place == "reset" else read.calls[0].result.info
    assert found == stored


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"documents": ["a text"]}, "a document of a ToolResult is str; expected Document"),
        ({"documents": [Document("7", "", "", math.nan)]}, "the score of a document is nan"),
        ({"info": None}, "info is NoneType; expected a dict"),
    ],
)
def test_a_result_that_could_not_be_saved_is_refused_when_it_is_made(changed, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ToolResult("x", CallOutcome.OK, **changed)
    found = ToolResult("x", CallOutcome.OK, [Document("7", "", "", np.float32(0.5))])
    assert found.documents == (Document("7", "", "", 0.5),) and type(found.documents[0].score) is float


@pytest.mark.parametrize("limit", [{"limits": ToolLimits(max_calls=1, retries=0)}, {"max_calls": 1}])
def test_fork_after_an_observation_repeats_no_call(protocol, limit):
    retriever = ToyRetriever()
    loop = make_loop(protocol, search_then_answer, retriever, **limit)
    parent = run(loop)
    at = parent.turns[1].start
    loop.engine.script = in_turn("<search> Mira </search>", "<answer> Oldfield </answer>")
    child = run(loop, index=3, start=parent, at=at)
    assert child.response_ids[:at] == parent.response_ids[:at] and child.logprobs[:at] == parent.logprobs[:at]
    assert child.fork == Fork(parent=0, at=at) and child.calls[0] == parent.calls[0]
    assert child.calls[1].result.outcome is CallOutcome.REFUSED  # the parent's call counts
    assert child.answer == "Oldfield" and retriever.queries == ["Mira Voss birthplace"]
    assert child.turns[0] == parent.turns[0] and child.turns[1].start == at


def test_fork_inside_a_turn_continues_it(protocol):
    loop = make_loop(protocol, search_then_answer)
    parent = run(loop)
    second = parent.turns[1]
    prefix = protocol.decode(parent.response_ids[second.start :]).index(" Grey Harbor </answer>")
    head = protocol.decode(parent.response_ids[second.start :])[:prefix]
    at = second.start + next(n for n in range(99) if protocol.decode(parent.response_ids[second.start :][:n]) == head)
    loop.engine.script = in_turn(" Oldfield </answer>")
    child = run(loop, index=1, start=parent, at=at)
    assert [(turn.start, turn.end) for turn in child.turns] == [
        (0, parent.turns[0].end),
        (second.start, len(child.response_ids)),
    ]
    said = protocol.decode(child.response_ids[second.start :])
    assert said == "<think> Grey Harbor </think>\n<answer> Oldfield </answer>"
    assert child.answer == "Oldfield"


@pytest.mark.parametrize("whole", [True])
def test_fork_inside_a_stop_string_still_stops(protocol, whole):
    """The engine sees "rch> ..." and no stop string; with ``whole`` another one follows, at which it does stop."""
    opening = protocol.tokenizer.encode("<think> birthplace </think>\n<search> Mira Voss </sea")
    ending = protocol.tokenizer.encode("rch>")
    loop = make_loop(protocol, in_turn([*opening, *ending], "<answer> Grey Harbor </answer>"))
    parent = run(loop)
    assert parent.turns[0].end == len(opening) + len(ending) and parent.turns[0].finish_reason == "stop"
    rest = protocol.tokenizer.encode("\n<search> Oldfield </search>" if whole else " and so on")
    loop.engine.script = in_turn([*ending, *rest], "<answer> Oldfield </answer>")
    child = run(loop, index=1, start=parent, at=len(opening))
    assert child.turns[0] == parent.turns[0] and child.calls[0].request == parent.calls[0].request
    end = parent.turns[0].observation_end
    assert child.response_ids[:end] == parent.response_ids[:end] and child.loss_mask[:end] == parent.loss_mask[:end]
    assert child.answer == "Oldfield"


def test_fork_at_an_impossible_place(protocol):
    loop = make_loop(protocol, search_then_answer)
    parent = run(loop)
    inside_observation, end = parent.turns[0].end + 1, len(parent.response_ids)
    for at in (parent.turns[0].end, inside_observation, end, end + 5, -1):
        with pytest.raises(ValueError, match="start of a turn"):
            run(loop, start=parent, at=at)


class Corridor:
    """An environment that scores itself: walk to the end. Opens with an observation."""

    def __init__(self, task, *, tools_enabled=True):
        self.place = 0

    async def reset(self):
        return FirstObservation("You stand in a corridor.", {"exits": ["forward"]}, {"success": 0.0})

    async def step(self, action):
        self.place += 1
        return StepResult((), (), done=self.place == 2, reward=0.5, measures={"success": float(self.place == 2)})

    async def close(self):
        pass


def test_environment_ends_and_scores_itself(protocol):
    loop = make_loop(protocol, lambda context, seed: f"forward{EOS}")
    loop.environment = Corridor
    trajectory = run(loop)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.ENVIRONMENT_DONE, 2)
    assert trajectory.reward == Reward(1.0, {"environment": 1.0, "success": 1.0})
    assert trajectory.task.question == "You stand in a corridor."
    assert trajectory.task.metadata == {"first_observation": {"exits": ["forward"]}, "own_question": TASK.question}
    assert "Question: You stand in a corridor.<|im_end|>" in protocol.decode(trajectory.prompt_ids)
    with pytest.raises(TypeError, match="no method resume"):
        run(loop, start=trajectory, at=trajectory.turns[1].start)


@pytest.mark.parametrize(("text", "why"), [("a page with <|im_end|> in it", "quotes"), (" ", "the question is empty")])
def test_a_first_observation_that_cannot_be_written_costs_its_trajectory(protocol, text, why):
    class Page(Corridor):
        async def reset(self):
            return FirstObservation(text)

    loop = make_loop(protocol, search_then_answer)
    loop.environment = Page
    assert run(loop).stop_reason is StopReason.INFRASTRUCTURE
    assert loop.failures[-1].startswith("Page.reset: task ") and why in loop.failures[-1]
    with pytest.raises(ValueError, match=r"quotes '<\|im_end\|>'"):  # in a file, which is checked before training
        run(make_loop(protocol, search_then_answer), dataclasses.replace(TASK, question="say <|im_end|>"))


@pytest.mark.parametrize(
    ("reward", "success", "message"),
    [
        (torch.tensor(0.5), np.int64(1), None),
        (math.nan, 1.0, "the reward of turn 1 is nan; expected a finite number"),
        (0.5, math.inf, "the part 'success' is inf; expected a finite number"),
    ],
)
def test_rewards_and_measures_of_environments_are_finite_numbers(protocol, reward, success, message):
    class Odd(Corridor):
        async def step(self, action):
            return dataclasses.replace(await super().step(action), reward=reward, measures={"success": success})

    loop = make_loop(protocol, lambda context, seed: f"forward{EOS}")
    loop.environment = Odd
    if message is None:
        trajectory = run(loop)
        assert trajectory.reward == Reward(1.0, {"environment": 1.0, "success": 1.0})
        assert [type(turn.reward) for turn in trajectory.turns] == [float, float]
        return
    with pytest.raises(RewardError, match=f"^Odd, trajectory {TASK.id}/0: {message}$"):
        run(loop)


def test_seeds_differ_by_turn_index_and_seed_only(protocol):
    def seeds(seed, index):
        loop = make_loop(protocol, search_then_answer)
        run(loop, seed=seed, index=index)
        return [request.sampling.seed for request in loop.engine.requests]

    assert seeds(0, 0) == seeds(0, 0)
    everything = seeds(0, 0) + seeds(0, 1) + seeds(1, 0)
    assert len(set(everything)) == len(everything) == 6


def test_skills_stand_in_the_prompt_and_in_the_task_and_a_branch_has_them_too(protocol):
    class Advice(Skills):
        def __init__(self):
            pass

        def inject(self, task, text, count):
            return Injection(f"Advice for {task.id}: {text}", Selection(), 3)

    loop = make_loop(protocol, search_then_answer)
    loop.skills = Advice()
    parent = run(loop)
    assert parent.task.skills == f"Advice for q1: {TASK.question}"
    assert f"{parent.task.skills}\n\n" in protocol.decode(parent.prompt_ids)
    child = run(loop, index=1, start=parent, at=parent.turns[1].start)
    assert child.task.skills == parent.task.skills and child.prompt_ids == parent.prompt_ids
    assert run(loop, mode=PromptMode.CLOSED_BOOK).task.skills == "", "closed-book prompts get no skills"
