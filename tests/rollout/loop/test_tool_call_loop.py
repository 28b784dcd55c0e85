"""The agent loop with tool calls in a published chat format, end to end."""

import asyncio
import json

import pytest

from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.agent_loop import AgentLoop, Budgets, Request
from rollout.protocols.hermes import CUT, HermesProtocol
from rollout.storage import load_trajectories, save_trajectories
from rollout.tools.limits import ToolLimits
from rollout.trajectory import ActionKind, CallOutcome, StopReason, Task, ToolResult
from tests.rollout.chat_models import LLAMA, QWEN, chat_model
from tests.rollout.scripted_engine import ScriptedEngine

TASK = Task("q1", "How many primes are below 100?", ("25",), "toy")


class Adder:
    """The tool of these tests: what Python would print for a sum."""

    name = "code_interpreter"

    def __init__(self):
        self.codes = []

    async def call(self, arguments):
        self.codes.append(arguments["code"])
        return ToolResult(str(sum(map(int, arguments["code"].split("+")))), CallOutcome.OK)

    async def close(self):
        pass


@pytest.fixture(scope="module", params=[*QWEN, *LLAMA])
def protocol(request, tmp_path_factory):
    return HermesProtocol(chat_model(tmp_path_factory.mktemp(request.param), request.param))


def call(protocol, code):
    if protocol.call_format == "llama3":
        return json.dumps({"name": "code_interpreter", "parameters": {"code": code}})
    value = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{value}\n</tool_call>"


def play(protocol, replies, **budgets):
    """The trajectory, the engine that has seen it, and the tool."""
    engine, tool = ScriptedEngine(replies, protocol.tokenizer), Adder()
    environment = QuestionAnswering({"code_interpreter": tool}, ToolLimits(retries=0))
    defaults = {"max_turn_tokens": 400, "max_observation_tokens": 400, "max_response_tokens": 4000}
    loop = AgentLoop(engine, protocol, environment, Budgets(**{**defaults, **budgets}))

    async def run():
        await engine.start()
        return await loop.run(TASK, group="g", index=0, request=Request(0, SamplingParams(max_new_tokens=400)))

    trajectory = asyncio.run(run())
    check(trajectory, engine)
    return trajectory, tool


def check(trajectory, engine):
    """Whatever happened: the ids are those of the engine, the mask is what was sampled, a step is a run of it."""
    whole = trajectory.prompt_ids + trajectory.response_ids
    for request, turn in zip(engine.requests, trajectory.turns, strict=True):
        assert request.token_ids == whole[: len(trajectory.prompt_ids) + turn.start]
    assert sum(trajectory.loss_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
    mask = (0, *trajectory.loss_mask)
    assert sum(now > before for before, now in zip(mask, mask[1:], strict=False)) == len(trajectory.turns)


def test_history_of_the_template_gives_every_turn_its_own_prompt(tmp_path):
    """The engine is asked with just the prompt that the turn keeps; only sampled tokens are in the response."""
    protocol = HermesProtocol(chat_model(tmp_path, "qwen3"), history="template")
    engine = ScriptedEngine(
        [f"<think>\nI add.\n</think>\n\n{call(protocol, '20+5')}<|im_end|>", "\\boxed{25}<|im_end|>"],
        protocol.tokenizer,
    )
    environment = QuestionAnswering({"code_interpreter": Adder()}, ToolLimits(retries=0))
    loop = AgentLoop(
        engine, protocol, environment, Budgets(max_turn_tokens=400, max_response_tokens=4000, max_length=4000)
    )
    request = Request(0, SamplingParams(max_new_tokens=400))

    async def run():
        await engine.start()
        return await loop.run(TASK, group="g", index=0, request=request)

    trajectory = asyncio.run(run())
    assert (trajectory.answer, trajectory.stop_reason) == ("25", StopReason.ANSWER)
    assert [turn.prompt_ids for turn in trajectory.turns] == [asked.token_ids for asked in engine.requests]
    assert all(trajectory.loss_mask) and len(trajectory.turns) == 2
    prompt = protocol.decode(trajectory.turns[1].prompt_ids)
    assert "<tool_response>\n25\n</tool_response>" in prompt and prompt.count("I add.") == 1


def rendered(protocol, trajectory, said):
    """What the template makes of question, ``said`` and results; turns as texts."""
    messages = [{"role": "user", "content": TASK.question}]
    for turn, text in zip(trajectory.turns, said, strict=True):
        messages.append({"role": "assistant", "content": text})
        results = [c.result.text for c in trajectory.calls if trajectory.turns[c.turn] is turn]
        if turn.action.kind is not ActionKind.ANSWER:
            errors = [turn.action.error] if turn.action.error else []
            messages += [{"role": "tool", "content": result} for result in results + errors]
    return protocol.chat.render(messages, open_turn=False).removesuffix("\n")


def test_two_rounds_and_an_answer(protocol):
    end = protocol.chat.end
    think = "<think>\nI add.\n</think>\n\n" if "reasoning_content" in protocol.tokenizer.chat_template else ""
    said = [think + call(protocol, "20+5"), think + call(protocol, "25+0"), think + "It is \\boxed{25}."]
    trajectory, tool = play(protocol, [text + end for text in said])
    assert tool.codes == ["20+5", "25+0"]
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "25")
    assert len(trajectory.turns) == len(trajectory.calls) + 1 == 3
    assert [turn.finish_reason for turn in trajectory.turns] == ["eos"] * 3
    assert protocol.decode(trajectory.prompt_ids + trajectory.response_ids) == rendered(protocol, trajectory, said)


def test_a_cut_turn_and_a_broken_call_are_answered_and_the_trajectory_goes_on(protocol, tmp_path):
    end = protocol.chat.end
    broken = call(protocol, "1")[:-1] if protocol.call_format == "llama3" else "<tool_call>\n{]\n</tool_call>"
    said = ["a" * 500, broken, call(protocol, "1+1"), "\\boxed{2}"]
    cut_at = 7
    said[0] = protocol.decode(protocol.chat.ids(said[0])[:cut_at])
    replies = [protocol.chat.ids("a" * 500)[:cut_at], *(text + end for text in said[1:])]
    trajectory, tool = play(protocol, replies)
    first, second, third, last = trajectory.turns
    assert [turn.action.kind.value for turn in trajectory.turns] == ["invalid", "invalid", "call", "answer"]
    assert (first.action.ended, first.finish_reason, first.action.error) == (False, "length", CUT)
    assert trajectory.response_ids[first.end] == protocol.chat.end_id and trajectory.loss_mask[first.end] == 0
    assert second.action.ended and "not valid JSON" in second.action.error
    assert (trajectory.answer, tool.codes) == ("2", ["1+1"])
    if "reasoning_content" not in protocol.tokenizer.chat_template:  # that one adds thinking to some of the turns
        assert protocol.decode(trajectory.prompt_ids + trajectory.response_ids) == rendered(protocol, trajectory, said)
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    assert load_trajectories(tmp_path / "t.parquet") == [trajectory]


def test_the_final_turn_may_not_call(protocol):
    end = protocol.chat.end
    trajectory, tool = play(protocol, [call(protocol, "1+1") + end] * 3, max_turns=2, final_turn=True)
    assert (trajectory.stop_reason, len(tool.codes), len(trajectory.turns)) == (StopReason.MAX_TURNS, 2, 3)
    assert trajectory.calls[-1].result.outcome is CallOutcome.REFUSED
    trajectory, tool = play(protocol, [call(protocol, "1+1") + end] * 2, max_turns=2, final_turn=False)
    assert (trajectory.stop_reason, len(tool.codes), len(trajectory.turns)) == (StopReason.MAX_TURNS, 2, 2)
    assert trajectory.turns[-1].observation_end == trajectory.turns[-1].end


def test_an_unknown_tool_is_refused_and_said_so(protocol):
    end = protocol.chat.end
    unknown = call(protocol, "1").replace("code_interpreter", "calculator")
    trajectory, _ = play(protocol, [unknown + end, "\\boxed{1}" + end])
    assert "There is no tool named calculator." in protocol.decode(trajectory.response_ids)
    assert trajectory.stop_reason is StopReason.ANSWER


def test_a_budget_that_ends_within_an_observation(protocol):
    """A result that fits only in part; then one of which not even the frame fits."""
    end = protocol.chat.end
    action = protocol.parse(call(protocol, "1") + end)
    frame = len(protocol.observation_ids(action, [ToolResult("", CallOutcome.OK)], 99)[0])
    digits = "+".join(["123456789"] * 5)
    trajectory, _ = play(protocol, [call(protocol, digits) + end, "\\boxed{1}" + end], max_observation_tokens=frame + 2)
    assert trajectory.turns[0].observation_truncated and trajectory.stop_reason is StopReason.ANSWER
    assert trajectory.turns[0].observation_end - trajectory.turns[0].end <= frame + 2
    trajectory, _ = play(protocol, [call(protocol, digits) + end], max_observation_tokens=frame - 1)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.LENGTH, 1)
