"""A model behind OpenAI-compatible servers plays agent programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from callbacks.training.weight_sync import WeightSync
from data_modules.datasets.questions import write_tasks
from data_modules.demonstrations.generate_trajectories import GenerateTrajectories
from data_modules.evaluation_data import EvaluationData
from rollout.programs.protocol import ProgramProtocol
from rollout.programs.requests import NO_TOOLS, RequestError
from rollout.programs.served_model import ServedModel
from rollout.rewards.qa import ExactMatchReward
from rollout.storage import load_trajectories
from rollout.system import RolloutSystem
from rollout.trajectory import ActionKind, StopReason, ToolRequest, split_turns
from tests.rollout.chat_models import LLAMA, QWEN, chat_model
from tests.rollout.programs.playing import SEARCH, TASK, Own, play, user
from tests.rollout.serving import Served, serving_apart

ARGUMENTS = '{"query": "primes"}'
FUNCTION = {"type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}


def said(content: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return {"choices": [{"message": {"role": "assistant", "content": content} | more, "finish_reason": finish}]} | {
        "usage": usage
    }


def calling(**more: Any) -> dict[str, Any]:
    return said("Look.", "tool_calls", tool_calls=[{"id": "call_9", **FUNCTION}], **more)


async def agent(task: Any, model: Any) -> dict[str, Any]:
    """Search once, then answer."""
    messages: list[Any] = [user(task.question)]
    first = (await model.chat(messages=messages, tools=[SEARCH]))["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "found"} for c in first.get("tool_calls", ())]
    second = await model.chat(messages=[*messages, first, *results], tools=[SEARCH], stop=["!"])
    return {"reward": 1, "answer": second["choices"][0]["message"]["content"]}


def system_of(protocol: Any, served: Served, program: Any = agent, **options: Any) -> RolloutSystem:
    engine = ServedModel([served.url + "/v1"], "big", backoff=0.001, **options)
    return RolloutSystem(engine, protocol, program=Own(program), max_turns=4, max_turn_tokens=64)


def test_requests_hold_the_conversation_and_the_evaluations_sampling(protocol, monkeypatch):
    monkeypatch.setenv("BIG_KEY", "k3y")
    with serving_apart([calling(reasoning_content="Hm."), said("25")]) as served:
        options = {"api_key_variable": "BIG_KEY", "extra": {"reasoning_effort": "low"}}
        trajectory = play(system_of(protocol, served, **options))
    assert trajectory.answer == "25" and trajectory.stop_reason is StopReason.PROGRAM_DONE
    first, second = served.bodies
    common = {"model": "big", "temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "tools": [SEARCH]}
    assert first == common | {"reasoning_effort": "low", "messages": [user(TASK.question)]}
    asked, turn, result = second["messages"]
    [sent] = turn.pop("tool_calls")
    assert asked == user(TASK.question)
    assert turn == {"role": "assistant", "content": "Look.", "reasoning_content": "Hm."}
    assert sent["function"]["name"] == "search" and json.loads(sent["function"]["arguments"]) == {"query": "primes"}
    assert result == {"role": "tool", "content": "found", "tool_call_id": sent["id"]}
    assert second["stop"] == ["!"] and served.headers[0]["Authorization"] == "Bearer k3y"


def test_sampling_may_be_left_to_the_server(protocol):
    with serving_apart([calling(), said("25")]) as served:
        play(system_of(protocol, served, sampling="server", max_tokens_as="max_completion_tokens"))
    assert not {"temperature", "top_p", "max_tokens"} & set(served.bodies[0])
    assert served.bodies[0]["max_completion_tokens"] == 64


def test_the_row_is_the_conversation_as_the_template_writes_it(protocol):
    with serving_apart([calling(reasoning_content="Hm."), said("25")]) as served:
        trajectory = play(system_of(protocol, served))
    text = protocol.decode((*trajectory.prompt_ids, *trajectory.response_ids))
    call = f'<tool_call>\n{{"name": "search", "arguments": {ARGUMENTS}}}\n</tool_call>'
    assert f"<think>\nHm.\n</think>\n\nLook.\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nfound" in text
    assert text.endswith("25<|im_end|>") and len(split_turns(trajectory)) == 1
    sampled = [token for token, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if mask]
    assert "found" not in protocol.decode(sampled) and protocol.decode(sampled).count("<|im_end|>") == 2
    assert [turn.action.kind for turn in trajectory.turns] == [ActionKind.CALL, ActionKind.ANSWER]
    assert [call.request.arguments for call in trajectory.calls] == [{"query": "primes"}]


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_a_turns_tokens_are_those_of_the_template(name, tmp_path):
    chat = ProgramProtocol(chat_model(tmp_path, name)).format_for(NO_TOOLS).chat
    calls = () if name in LLAMA else (ToolRequest("search", {"query": "primes"}),)  # Llama's show a call or a text
    for content, made in (("It is 25.", ()), ("", calls), ("Look.", calls)):
        turn = chat.message(made) if made else {"role": "assistant"}
        asked = {"role": "user", "content": "question"}
        whole = chat.render([asked, turn | {"content": content}], open_turn=False)
        text = chat.render([asked]) + chat.tokenizer.decode(chat.turn_ids(content, None, made))
        assert whole.startswith(text) and not whole.removeprefix(text).strip()


# Headers of Qwen3 and Qwen3.5: without thinking; opened; opened and closed. The last drop thinking from the history.
HEADERS = {
    "plain": ("", True, "<think>\nHm.\n</think>\n\n25", "25"),
    "opened": ("<think>\n", True, "Hm.\n</think>\n\n25", "\n</think>\n\n25"),
    "closed": ("<think>\n\n</think>\n\n", True, "25", "25"),
    "opened, dropped": ("<think>\n", False, "Hm.\n</think>\n\n25", "\n</think>\n\n25"),
    "closed, dropped": ("<think>\n\n</think>\n\n", False, "25", "25"),
}


@pytest.mark.parametrize("form", HEADERS)
def test_a_turn_follows_the_thinking_of_its_header(form, tmp_path):
    header, keeps, thought, plain = HEADERS[form]
    written = "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n" if keeps else ""
    empty = "{%- else %}" + (header if "</think>" in header else header + "\n</think>\n\n" if header else "")
    written += (empty + "{%- endif %}") if written else ""
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
        "{%- if m.role == 'assistant' %}{{ '\n' }}"
        + written.replace("\n", "{{ '\n' }}")
        + "{%- else %}{{ '\n' }}{%- endif %}"
        "{{ m.content }}<|im_end|>{{ '\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
        + header.replace("\n", "{{ '\n' }}")
        + "{%- endif %}"
    )
    chat = ProgramProtocol(chat_model(tmp_path, "qwen3", template)).format_for(NO_TOOLS).chat
    decoded = [chat.tokenizer.decode(chat.turn_ids("25", thinking)) for thinking in ("Hm.", None)]
    assert chat.header.endswith(f"assistant\n{header}")
    assert decoded == [f"{thought}<|im_end|>", f"{plain}<|im_end|>"]


def test_control_tokens_in_a_reply_end_no_turn(protocol):
    with serving_apart([said("a<|im_end|>\n<|im_start|>user\nb")]) as served:
        trajectory = play(system_of(protocol, served))
    ids = protocol.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    first = trajectory.response_ids[: trajectory.turns[0].end]
    assert [token for token in first if token in ids] == [ids[1]] == [first[-1]]


def test_an_unreadable_call_is_text_and_a_cut_turn_is_cut(protocol):
    broken = [{"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"query": '}}]
    seen: list[Any] = []

    async def asking(task, model):
        seen.extend([(await model.chat(messages=[user(text)], tools=[SEARCH]))["choices"][0] for text in "ab"])
        return 1

    with serving_apart([said(None, "tool_calls", tool_calls=broken), said("It is", "length")]) as served:
        trajectory = play(system_of(protocol, served, asking))
    assert (
        "tool_calls" not in seen[0]["message"] and '"query": ' in json.loads(seen[0]["message"]["content"])["arguments"]
    )
    assert seen[1]["finish_reason"] == "length" and trajectory.turns[1].action.kind is ActionKind.INVALID
    assert not trajectory.turns[1].action.ended


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        ((400, "maximum context length is 4096 tokens"), StopReason.LENGTH, "maximum context length"),
        ((400, "the request exceeds the available context size"), StopReason.LENGTH, "context size"),
        ((400, "Invalid 'tools[0].function.name': string too long"), StopReason.INFRASTRUCTURE, "string too long"),
        (said({"not": "a text"}), StopReason.INFRASTRUCTURE, "expected a chat completion"),
        ((404, "the model `big` does not exist"), StopReason.INFRASTRUCTURE, "does not exist"),
        ((200, "<html>"), StopReason.INFRASTRUCTURE, "expected a chat completion"),
    ],
)
def test_refusals_of_the_server(protocol, answer, reason, words):
    with serving_apart([answer]) as served:
        system = system_of(protocol, served)
        program: Any = system.program
        program.failure_reward = 0.0
        seen: list[str] = []

        async def told(task, model):
            try:
                await agent(task, model)
            except RequestError as error:
                seen.append(str(error))
                raise

        program.play = told
        trajectory = play(system)
    assert trajectory.stop_reason is reason
    assert words in (system.failures[-1] if reason is StopReason.INFRASTRUCTURE else seen[0])


def test_texts_are_stripped_and_refusals_and_parts_are_texts(protocol):
    parts = [{"type": "text", "text": "\n\n2"}, {"type": "text", "text": "5\n"}]
    answers = [said("\n\n25", reasoning="\nHm.\n"), said(parts), said(None, refusal="I cannot.")]
    found = []

    async def asking(task, model):
        messages: list[Any] = [user(task.question)]
        for _ in answers:
            found.append((await model.chat(messages=messages))["choices"][0]["message"])
            messages += [found[-1], user("And?")]
        return 1

    with serving_apart(answers) as served:
        play(system_of(protocol, served, asking))
    assert [message["content"] for message in found] == ["25", "25", "I cannot."]
    assert found[0]["reasoning_content"] == "Hm."
    assert served.bodies[1]["messages"][1]["reasoning"] == "Hm.", "sent back in the field that the server uses"


def test_a_result_is_sent_with_the_id_of_its_call_and_arguments_may_be_objects(protocol):
    two = [{"id": i, "function": {"name": "search", "arguments": given}} for i, given in (("a", {"q": 1}), ("b", "{}"))]
    listed = [{"id": "c", "function": {"name": "search", "arguments": '[["q", 1]]'}}]

    async def asking(task, model):
        asked: list[Any] = [user(task.question)]
        first = (await model.chat(messages=asked, tools=[SEARCH]))["choices"][0]["message"]
        assert [json.loads(c["function"]["arguments"]) for c in first["tool_calls"]] == [{"q": 1}, {}]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][1]["id"], "content": "second"}
        second = await model.chat(messages=[*asked, first, result], tools=[SEARCH])
        assert "tool_calls" not in second["choices"][0]["message"]
        return 1

    with serving_apart(
        [said(None, "tool_calls", tool_calls=two), said(None, "tool_calls", tool_calls=listed)]
    ) as served:
        assert play(system_of(protocol, served, asking)).stop_reason is StopReason.PROGRAM_DONE
    _, turn, result = served.bodies[1]["messages"]
    assert result["tool_call_id"] == turn["tool_calls"][1]["id"]


def test_a_served_model_plays_programs_and_is_not_trained(protocol):
    engine = ServedModel(["http://127.0.0.1:1/v1"], "big")
    with pytest.raises(ValueError, match="plays agent programs only"):
        RolloutSystem(engine, protocol)
    system = RolloutSystem(engine, protocol, program=Own(agent))
    with pytest.raises(ValueError, match="takes no weights"):
        WeightSync().accept_data(EvaluationData(system))


def test_a_teachers_trajectories_are_demonstrations(protocol, tmp_path):
    write_tasks(tmp_path / "q.parquet", [TASK], lambda task: task.question)
    with serving_apart([calling(), said("25")]) as served:
        engine = ServedModel([served.url + "/v1"], "big")
        system = RolloutSystem(engine, protocol, program=Own(agent), reward=ExactMatchReward(), max_turns=4)
        made = GenerateTrajectories(system, [str(tmp_path / "q.parquet")]).run(tmp_path / "out")
    [demonstration] = load_trajectories(next((tmp_path / "out" / "trajectories").iterdir()))
    assert made["kept"] == 1 and sum(demonstration.loss_mask) > 10
    assert protocol.decode(demonstration.response_ids).endswith("25<|im_end|>")
