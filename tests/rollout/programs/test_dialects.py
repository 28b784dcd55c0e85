"""OpenAI's responses and Anthropic's messages: equal to chat completions, with the real clients."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.programs.commands import CommandProgram
from rollout.programs.dialects import chat_completions, messages, responses
from rollout.programs.requests import RequestError
from rollout.trajectory import StopReason, split_turns
from tests.rollout.programs.playing import END, SEARCH, TASK, call, play, system_of, user

THOUGHT = "<think>\nHm.\n</think>\n\nLook.\n"
FUNCTION = SEARCH["function"]
FLAT = {"type": "function", "strict": True} | FUNCTION
TOOL = {"name": "search", "input_schema": FUNCTION["parameters"]}


def said(text: str, n: int) -> str:
    return THOUGHT + call() if n == 0 else f"25{END}"


async def chat_agent(task: Any, model: Any) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key="none", max_retries=0) as api:
        asked: list[Any] = [{"role": "system", "content": "Be brief."}, user(task.question)]
        first = (await api.chat.completions.create(model="m", messages=asked, tools=[SEARCH])).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "found"}
        answer = await api.chat.completions.create(model="m", messages=[*asked, first, result], tools=[SEARCH])
    return {"reward": 1, "answer": answer.choices[0].message.content}


def responses_agent(stream: bool, previous: bool):
    async def agent(task, model):
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key="none", max_retries=0) as api:

            async def turn(**asked):
                asked = {"model": "m", "tools": [FLAT], "instructions": "Be brief."} | asked
                if not stream:
                    return await api.responses.create(**asked)
                async with api.responses.stream(**asked) as events:
                    kinds = [event.type async for event in events]
                    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
                    assert "response.output_text.delta" in kinds
                    return await events.get_final_response()

            first = await turn(input=task.question)
            thought, text, wanted = first.output
            assert thought.content[0].text == "Hm." and first.output_text == "Look." == text.content[0].text
            assert (wanted.type, wanted.name, json.loads(wanted.arguments)) == (
                "function_call",
                "search",
                {"query": "primes"},
            )
            result: Any = {"type": "function_call_output", "call_id": wanted.call_id, "output": "found"}
            if previous:
                answer = await turn(input=[result], previous_response_id=first.id)
            else:
                sent = [item.model_dump(exclude_none=True, mode="json") for item in first.output]
                answer = await turn(input=[user(task.question), *sent, result])
            assert answer.status == "completed" and answer.usage.output_tokens > 0
        return {"reward": 1, "answer": answer.output_text}

    return agent


def messages_agent(stream: bool):
    async def agent(task, model):
        base = model.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as api:

            async def turn(asked):
                wanted: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "system": "Be brief."}
                if not stream:
                    return await api.messages.create(messages=asked, **wanted)
                async with api.messages.stream(messages=asked, **wanted) as events:
                    return await events.get_final_message()

            asked: list[Any] = [user(task.question)]
            first = await turn(asked)
            thought, text, use = first.content
            assert (thought.thinking, text.text, use.name, use.input) == ("Hm.", "Look.", "search", {"query": "primes"})
            assert first.stop_reason == "tool_use" and first.usage.output_tokens > 0
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "found"}]}
            asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            answer = await turn(asked)
            assert answer.stop_reason == "end_turn"
        return {"reward": 1, "answer": answer.content[-1].text}

    return agent


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(responses_agent(stream=False, previous=False), id="responses"),
        pytest.param(responses_agent(stream=False, previous=True), id="responses-previous"),
        pytest.param(responses_agent(stream=True, previous=False), id="responses-stream"),
        pytest.param(messages_agent(stream=False), id="messages"),
        pytest.param(messages_agent(stream=True), id="messages-stream"),
    ],
)
def test_every_dialect_gives_the_row_of_chat_completions(protocol, agent):
    expected, found = (play(system_of(protocol, said, one)) for one in (chat_agent, agent))
    assert found.answer == expected.answer == "25" and found.reward.parts == {"program": 1.0}
    assert found.prompt_ids == expected.prompt_ids and found.response_ids == expected.response_ids
    assert found.loss_mask == expected.loss_mask and len(split_turns(found)) == 1


# --- requests of any conversation -------------------------------------------------------------------------------------

KINDS = ["user", "assistant", "system", "message", "reasoning", "function_call", "tool_use", "tool_result", "thinking"]
FIELDS = ["role", "content", "type", "text", "id", "name", "summary", "thinking", "input", "arguments", "output"]
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)
calls = st.lists(st.tuples(words, st.dictionaries(words, words | st.integers(), max_size=2)), min_size=1, max_size=3)
thoughts = st.none() | words
turns = st.lists(st.tuples(words, st.none() | words, st.none() | calls, thoughts), min_size=1, max_size=4)


def three_forms(system: str, conversation: list[Any]) -> tuple[Any, Any, Any]:
    """Write one conversation in three dialects. Its turns are (user's text, the model's text, its calls, its
    thinking)."""
    chat: list[Any] = [{"role": "system", "content": system}]
    items: list[Any] = []
    blocks: list[Any] = []
    number = 0
    for asked, text, made, thought in conversation:
        chat.append(user(asked))
        items.append(user(asked))
        blocks.append(user(asked))
        if text is None and made is None:
            continue
        turn: list[Any] = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": ""}]
        turn += [] if text is None else [{"type": "text", "text": text}]
        if thought is not None:
            part = {"type": "reasoning_text", "text": thought}
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [], "content": [part]})
        items += [] if text is None else [{"type": "message", "role": "assistant", "content": text}]
        written, results = [], []
        for name, arguments in made or ():
            number += 1
            identity, dumped = f"id{number}", json.dumps(arguments)
            written.append({"id": identity, "type": "function", "function": {"name": name, "arguments": dumped}})
            items.append({"type": "function_call", "call_id": identity, "name": name, "arguments": dumped})
            turn.append({"type": "tool_use", "id": identity, "name": name, "input": arguments})
            results.append((identity, f"result {number}"))
        chat.append({"role": "assistant", "content": text, "tool_calls": written, "reasoning_content": thought})
        blocks.append({"role": "assistant", "content": turn})
        for identity, result in reversed(results):  # in any order
            chat.append({"role": "tool", "tool_call_id": identity, "content": result})
            items.append({"type": "function_call_output", "call_id": identity, "output": result})
        if results:
            found = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, result in reversed(results)]
            blocks.append({"role": "user", "content": found})
    return (
        {"messages": chat, "tools": [SEARCH], "max_tokens": 7},
        {"input": items, "instructions": system, "tools": [FLAT], "max_output_tokens": 7},
        {"messages": blocks, "system": system, "tools": [TOOL], "max_tokens": 7},
    )


@settings(deadline=None, max_examples=100)
@given(system=words, conversation=turns)
def test_one_conversation_is_one_request_in_each_dialect(system, conversation):
    chat, items, blocks = three_forms(system, conversation)
    expected = chat_completions.read(chat, {})
    assert responses.read(items, {}) == expected
    assert messages.read(blocks, {}) == expected


def test_the_model_reads_the_schema_of_a_tool_in_the_order_of_its_keys():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}, "required": ["b"]}
    function = {"name": "f", "description": "Does it.", "parameters": schema}
    expected = [{"type": "function", "function": function}]
    flat = {"type": "function", "strict": True} | {name: function[name] for name in sorted(function, reverse=True)}
    block = {"input_schema": schema, "description": "Does it.", "name": "f"}
    bodies = [({"input": "q", "tools": [flat]}, responses), ({"messages": [user("q")], "tools": [block]}, messages)]
    for body, dialect in [*bodies, ({"messages": [user("q")], "tools": expected}, chat_completions)]:
        assert json.dumps(dialect.read(body, {}).tools.schemas) == json.dumps(expected)


@pytest.mark.parametrize("dialect", [responses, messages], ids=["responses", "messages"])
@settings(deadline=None, max_examples=100)
@given(
    body=st.dictionaries(
        st.sampled_from(
            ["input", "messages", "system", "tools", "tool_choice", "instructions", "previous_response_id", "text"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | words | st.sampled_from(KINDS),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
            max_leaves=12,
        ),
    )
    | st.none()
    | st.integers()
)
def test_a_malformed_body_is_refused_in_one_line(dialect, body):
    try:
        dialect.read(body, {})
    except RequestError as error:
        assert error.status == 400 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (responses, {"input": "q", "background": True}, "background is not supported"),
        (responses, {"input": "q", "previous_response_id": "resp_x"}, "no response of this rollout"),
        (responses, {"input": "q", "max_output_tokens": 0}, "max_output_tokens is 0"),
        (responses, {}, "input is missing"),
        (responses, {"input": [{"type": "reasoning", "content": 5}]}, r"input item 1 \(reasoning\)"),
        (responses, {"input": [{"type": "web_search_call"}]}, "input item 1 has the type 'web_search_call'"),
        (responses, {"input": "q", "tools": [{"type": "web_search"}]}, "tools has one of type 'web_search'"),
        (responses, {"input": "q", "text": {"format": {"type": "json_schema"}}}, "text.format is"),
        (messages, {"messages": [user("q")], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        (messages, {"messages": [user("q")], "tool_choice": {"type": "any"}}, 'tool_choice.type is "any"'),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a block of type 'image'"),
        (messages, {"messages": [user("q")], "output_config": {"format": {}}}, "structured output"),
    ],
)
def test_what_a_rollout_cannot_follow_is_refused(dialect, body, message):
    with pytest.raises(RequestError, match=message):
        dialect.read(body, {})


def test_text_that_changes_with_every_request_breaks_no_conversation():
    def asked(digest):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {digest}"}, {"type": "text", "text": "Go."}]
        inline = {"role": "system", "content": [*system[:1], {"type": "text", "text": "On."}]}
        return messages.read({"system": system, "messages": [user("q"), inline]}, {})

    assert asked("a") == asked("b")
    assert [m.content for m in asked("a").messages] == ["Go.", "q", "On."]


def test_instructions_and_the_first_messages_of_the_system_are_one_message():
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]}
    asked = responses.read({"instructions": "One.", "input": [developer, user("q")]}, {})
    assert [(m.role, m.content) for m in asked.messages] == [("system", "One.\n\nTwo."), ("user", "q")]
    inline = {"role": "system", "content": "Two."}
    assert messages.read({"system": "One.", "messages": [inline, user("q")]}, {}).messages == asked.messages


def test_harmless_options_and_hidden_thinking_are_ignored():
    redacted = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}],
    }
    effort = {"output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 9}, "metadata": {}}
    asked = messages.read({"messages": [user("q"), redacted, user("r")]} | effort, {})
    assert [m.content for m in asked.messages] == ["q", "a", "r"]
    options = {"reasoning": {"effort": "low"}, "truncation": "auto", "include": [], "parallel_tool_calls": False}
    pieces = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "ab"]
    asked = responses.read(
        {"input": [user("q"), *pieces, {"role": "assistant", "content": "c"}, user("r")]} | options, {}
    )
    assert asked.thinking == (None, "ab", None) and len(asked.messages) == 3


def test_a_whole_number_that_javascript_sends_back_continues_the_row(protocol):
    async def agent(task, model):
        base = model.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as api:
            wanted: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL]}
            asked: list[Any] = [user(task.question)]
            [use] = (await api.messages.create(messages=asked, **wanted)).content
            assert use.input == {"query": 1.0}
            sent = {"type": "tool_use", "id": use.id, "name": use.name, "input": {"query": 1}}
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
            asked += [{"role": "assistant", "content": [sent]}, {"role": "user", "content": [result]}]
            await api.messages.create(messages=asked, **wanted)
        return 1

    one = call().replace('"primes"', "1.0")
    assert len(split_turns(play(system_of(protocol, lambda text, n: one if n == 0 else f"25{END}", agent)))) == 1


def test_a_response_is_kept_unless_the_client_stores_none(protocol):
    async def agent(task, model):
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key="none", max_retries=0) as api:
            first = await api.responses.create(model="m", input="q", store=False)
            with pytest.raises(openai.BadRequestError, match="no response of this rollout"):
                await api.responses.create(model="m", input="r", previous_response_id=first.id)
        return 1

    assert play(system_of(protocol, lambda text, n: f"25{END}", agent)).stop_reason is StopReason.PROGRAM_DONE


def test_limits_and_stops_have_each_dialects_names(protocol):
    seen: dict[str, Any] = {}

    async def agent(task, model):
        async with httpx.AsyncClient(base_url=model.base_url) as http:
            short = {"messages": [user("q")], "max_tokens": 2, "model": "m"}
            seen["cut"] = (await http.post("/messages", json=short)).json()
            seen["incomplete"] = (await http.post("/responses", json={"input": "q", "max_output_tokens": 2})).json()
            stop = {"messages": [user("q")], "stop_sequences": ["two"], "max_tokens": 50}
            seen["stop"] = (await http.post("/messages", json=stop)).json()
            seen["counted"] = (await http.post("/messages/count_tokens", json=short)).json()
            over = await http.post("/messages", json=short)
            seen["over"] = (over.status_code, over.json())
        return 1

    play(system_of(protocol, lambda text, n: f"one two three four{END}", agent, max_turns=3))
    assert seen["cut"]["stop_reason"] == "max_tokens"
    assert (seen["incomplete"]["status"], seen["incomplete"]["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (seen["stop"]["stop_reason"], seen["stop"]["stop_sequence"]) == ("stop_sequence", "two")
    status, body = seen["over"]
    assert status == 400 and body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "max_turns" in body["error"]["message"] and body["error"]["code"] == "max_turns"
    assert seen["counted"]["type"] == "error"


def test_anthropics_client_finds_the_model_in_the_environment_of_a_command(protocol):
    code = (
        "import anthropic, os\n"
        "said = anthropic.Anthropic().messages.create(model=os.environ['ANTHROPIC_MODEL'], max_tokens=9,\n"
        "    messages=[{'role': 'user', 'content': os.environ['TASK_QUESTION']}])\n"
        "print('it is ' + said.content[0].text)"
    )
    program = CommandProgram([sys.executable, "-c", code], timeout_s=120)
    trajectory = play(system_of(protocol, lambda text, n: f"{25 if TASK.question in text else 0}{END}", program))
    assert (trajectory.answer, trajectory.stop_reason) == ("it is 25", StopReason.UNSCORED)
