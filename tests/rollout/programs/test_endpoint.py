"""The endpoint over HTTP: OpenAI's client, streams, errors, limits, secrets, rewards, failures."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import aiohttp
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.base import EngineGone
from rollout.programs.requests import RequestError, read_request
from rollout.storage import load_trajectories, save_trajectories
from rollout.trajectory import InfrastructureError, RewardError, StopReason, split_turns
from tests.rollout.programs.playing import END, SAMPLING, SEARCH, TASK, Own, Sampler, call, play, system_of, user
from tests.rollout.programs.test_conversations import message_of

YES = lambda text, n: f"yes{END}"  # noqa: E731


def client(model, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0, **options)


def test_openais_client_calls_tools_and_continues(protocol):
    async def agent(task, model):
        async with client(model) as api:
            assert [m.id async for m in api.models.list()] == ["policy"]
            messages: list = [user(task.question)]
            said = (await api.chat.completions.create(model="policy", messages=messages, tools=[SEARCH])).choices[0]
            assert said.finish_reason == "tool_calls" and said.message.tool_calls[0].function.name == "search"
            messages += [said.message, {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "25"}]
            answer = await api.chat.completions.create(model="policy", messages=messages, tools=[SEARCH])
        assert answer.choices[0].message.content == "25" and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens > 0 and answer.usage.prompt_tokens > 0
        return {"reward": 1, "answer": answer.choices[0].message.content, "metrics": {"calls": 1}}

    trajectory = play(system_of(protocol, lambda text, n: call() if n == 0 else f"25{END}", agent))
    assert trajectory.stop_reason is StopReason.PROGRAM_DONE and trajectory.answer == "25"
    assert trajectory.reward.parts == {"program": 1.0, "calls": 1.0} and len(split_turns(trajectory)) == 1


def test_a_stream_is_the_same_turn_and_the_same_row(protocol):
    said = f"<think>\nHm.\n</think>\n\nLook.\n{call()}"

    def agent_of(stream):
        async def agent(task, model):
            async with client(model) as api:
                asked = {"model": "m", "messages": [user("q")], "tools": [SEARCH]}
                if not stream:
                    message = (await api.chat.completions.create(**asked)).choices[0].message
                    found = (message.content, message.reasoning_content, message.tool_calls[0].function.arguments)
                else:
                    deltas, usage = [], None
                    more = {"stream": True, "stream_options": {"include_usage": True}}
                    async for chunk in await api.chat.completions.create(**asked, **more):
                        deltas += [choice.delta for choice in chunk.choices]
                        usage = chunk.usage or usage
                    assert usage is not None and usage.completion_tokens > 0
                    text = "".join(delta.content or "" for delta in deltas)
                    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
                    calls = [c.function.arguments for delta in deltas for c in delta.tool_calls or ()]
                    found = (text, thought, "".join(calls))
            seen.append(found)
            return 1

        return agent

    seen: list = []
    rows = [play(system_of(protocol, lambda text, n: said, agent_of(stream))) for stream in (False, True)]
    assert seen[0] == seen[1] == ("Look.", "Hm.", '{"query": "primes"}')
    assert rows[0].response_ids == rows[1].response_ids and rows[0].prompt_ids == rows[1].prompt_ids


def json_text(value):
    """JSON also of what is nested more deeply than the encoder allows."""
    return json.dumps({k: v for k, v in value.items() if k != "x"})[:-1] + (
        f', "x": {"[" * 99999}}}' if "x" in value else "}"
    )


REFUSALS = {
    "n": ({"n": 2}, "n is 2"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format is"),
    "bias": ({"logit_bias": {"1": 5}}, "logit_bias is"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice is"),
    "no messages": ({"messages": []}, "messages is list"),
    "role": ({"messages": [{"role": "function", "content": "x"}]}, 'message 1 has the role "function"'),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type image_url"),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "the arguments of f in message 1",
    ),
    "tool": ({"tools": [{"type": "retrieval"}]}, "tools has one of type 'retrieval'"),
    "max tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "role of another type": ({"messages": [{"role": []}]}, "message 1 has the role []"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls of message 1 (assistant) is int"),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "text": None}]}]},
        "a part of type refusal",
    ),
    "name as function": ({"tools": [{"type": "function", "function": "search"}]}, "tools has a function that is str"),
    "nested": ({"messages": [{"role": "user", "content": [[]]}], "x": 1}, "the body is no JSON"),
    "nested arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99999}}]}]},
        "the arguments of f",
    ),
    "long stop": ({"stop": "x" * 300}, "sampling.stop"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_rollout_cannot_do_is_refused_in_a_line(name, protocol):
    body, said = REFUSALS[name]

    async def agent(task, model):
        async with httpx.AsyncClient(base_url=model.base_url) as api:
            text = json_text({"messages": [user("q")]} | body)
            answer = await api.post("/chat/completions", content=text)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["message"].startswith(said) or said in error["message"], error["message"]
        assert "\n" not in error["message"]
        return 1

    trajectory = play(system_of(protocol, YES, agent))
    assert trajectory.stop_reason is StopReason.PROGRAM_DONE and not trajectory.turns


def test_temperature_is_ignored_and_counted(protocol):
    async def agent(task, model):
        await model.chat(messages=[user("q")], temperature=0.0, top_p=0.1, unknown_option=3)
        return 1

    system = system_of(protocol, YES, agent)
    play(system)
    assert system.engine.requests[0].sampling.temperature == 1.0
    assert system.agent_loop.reports[0].ignored == {"temperature": 1, "top_p": 1}


def test_a_stop_text_ends_the_turn_and_the_conversation_goes_on(protocol):
    async def agent(task, model):
        said = message_of(await model.chat(messages=[user("q")], stop=["Observation:"]))
        assert said["content"] == "Thought: look"
        await model.chat(messages=[user("q"), said, user("Observation: 25")], stop=["Observation:"])
        return 1

    says = ["Thought: look\nObservation: 99", f"25{END}"]
    trajectory = play(system_of(protocol, lambda text, n: says[n], agent))
    [row] = split_turns(trajectory)
    text = protocol.decode(row.response_ids)
    assert text.startswith("Thought: look\nObservation:") and "99" not in text
    assert text[len("Thought: look\nObservation:") :].startswith("<|im_end|>\n<|im_start|>user\nObservation: 25")


def test_limits_are_errors_and_reasons(protocol):
    async def agent(task, model):
        messages = [user("q")]
        for _ in range(9):
            messages += [message_of(await model.chat(messages=messages)), user("on")]
        return 1

    trajectory = play(system_of(protocol, YES, agent, max_turns=3))
    assert trajectory.stop_reason is StopReason.UNSCORED and len(trajectory.turns) == 3, "it failed without a reward"

    limited = Own(agent)
    limited.failure_reward = -1.0
    ended = play(system_of(protocol, YES, limited, max_turns=3))
    assert ended.stop_reason is StopReason.MAX_TURNS and ended.reward.total == -1.0 and ended.trainable

    class Half:
        def score(self, trajectory):
            return 0.5

    assert play(system_of(protocol, YES, agent, Half(), max_turns=3)).stop_reason is StopReason.MAX_TURNS
    short = play(system_of(protocol, YES, agent, Half(), max_length=60))
    assert short.stop_reason is StopReason.LENGTH and short.reward.total == 0.5 and short.trainable
    few = play(system_of(protocol, YES, agent, Half(), max_response_tokens=3))
    assert few.stop_reason is StopReason.LENGTH and sum(few.loss_mask) <= 3

    async def careful(task, model):
        try:
            await agent(task, model)
        except Exception as error:
            assert error.code == "max_turns"
        return 0.25

    done = play(system_of(protocol, YES, careful, max_turns=3))
    assert done.stop_reason is StopReason.PROGRAM_DONE and done.reward.total == 0.25


def test_parallel_requests_do_not_use_up_each_others_tokens(protocol):
    async def agent(task, model):
        await asyncio.gather(*(model.chat(messages=[user(str(n))]) for n in range(8)))
        return 1

    engine = Sampler(protocol, YES, latency=0.01)
    assert len(play(system_of(protocol, engine, agent, max_response_tokens=256)).turns) == 8


def test_without_the_secret_there_is_nothing_and_no_log_has_it(protocol, caplog):
    caplog.set_level(logging.DEBUG)
    kept = {}

    async def agent(task, model):
        kept["url"] = model.base_url
        root, _, secret = model.base_url.removesuffix("/v1").rpartition("/")
        async with httpx.AsyncClient() as api:
            for other in (secret[:-1], secret + "x", "", "../" + secret):
                answer = await api.post(f"{root}/{other}/v1/chat/completions", json={"messages": [user("q")]})
                assert answer.status_code == 404 and secret not in answer.text
            assert (await api.get(f"{root.removesuffix('/s')}/")).status_code == 404
            assert (await api.post(f"{model.base_url}/chat/completions", content=b"{")).status_code == 400
        raise ValueError("no answer")

    async def late(task, model):
        async with httpx.AsyncClient() as api:
            answer = await api.post(f"{kept['url']}/chat/completions", json={"messages": [user("q")]})
        assert answer.status_code == 410 and answer.json()["error"]["message"].startswith("this rollout is over")
        return 1

    play(system_of(protocol, YES, agent))
    secret = kept["url"].split("/")[-2]
    assert len(secret) >= 32 and not any(secret in r.getMessage() for r in caplog.records if r.name != "httpx")

    programs = iter((agent, late))

    async def both(task, model):
        return await next(programs)(task, model)

    system = system_of(protocol, YES, both)
    try:
        first, second = (system.rollout([TASK], sampling=SAMPLING, seed=1)[0] for _ in range(2))
    finally:
        system.close()
    assert first.stop_reason is StopReason.UNSCORED and second.stop_reason is StopReason.PROGRAM_DONE


def test_what_comes_late_is_in_no_row(protocol):
    late = {}

    async def agent(task, model):
        await model.chat(messages=[user("q")])
        late["task"] = asyncio.ensure_future(model.chat(messages=[user("too late")]))
        await asyncio.sleep(0.01)
        return 1

    engine = Sampler(protocol, YES, latency=lambda ids: 0.0 if len(engine.requests) == 1 else 30.0)
    began = time.monotonic()
    trajectory = play(system_of(protocol, engine, agent))
    assert len(engine.requests) == 2 and len(trajectory.turns) == 1 and time.monotonic() - began < 20
    assert late["task"].exception().status == 410


def test_a_client_that_hangs_up_leaves_no_turn(protocol):
    async def agent(task, model):
        async with aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await session.post(f"{model.base_url}/chat/completions", json={"messages": [user("q")]})
            async with session.post(f"{model.base_url}/chat/completions", json={"messages": [user("q")]}) as answer:
                assert answer.status == 200
        return 1

    engine = Sampler(protocol, YES, latency=lambda ids: 30.0 if len(engine.requests) == 1 else 0.0)
    trajectory = play(system_of(protocol, engine, agent))
    assert len(engine.requests) == 2 and len(trajectory.turns) == 1


def test_an_engine_that_fails_is_no_fault_of_the_program(protocol):
    answers = []

    async def agent(task, model):
        async with httpx.AsyncClient(base_url=model.base_url) as api:
            try:
                answers.append(await api.post("/chat/completions", json={"messages": [user("q")]}))
            finally:
                return 1.0  # noqa: B012

    def fails(error):
        engine = Sampler(protocol, YES)
        engine._script = lambda ids, sampling: error
        return engine

    failed = play(system_of(protocol, fails(InfrastructureError("no memory")), agent))
    assert failed.stop_reason is StopReason.INFRASTRUCTURE and failed.reward is None and failed.left_out
    with pytest.raises(EngineGone, match="gone for good"):
        play(system_of(protocol, fails(EngineGone("gone for good")), agent))


@pytest.mark.parametrize(
    "returned, reward, answer",
    [(1, 1.0, None), (True, 1.0, None), ("text", None, "text"), ({"reward": 0.5, "answer": "a"}, 0.5, "a")],
)
def test_what_a_program_may_return(returned, reward, answer, protocol):
    async def agent(task, model):
        await model.chat(messages=[user("q")])
        return returned

    trajectory = play(system_of(protocol, YES, agent))
    assert (None if trajectory.reward is None else trajectory.reward.total, trajectory.answer) == (reward, answer)
    assert trajectory.left_out is (reward is None)


def test_no_reward_is_left_out_and_never_0(protocol):
    async def agent(task, model):
        await model.chat(messages=[user("q")])

    system = system_of(protocol, YES, agent)
    trajectory = play(system)
    assert trajectory.stop_reason is StopReason.UNSCORED and trajectory.reward is None and not trajectory.trainable
    assert system.failures == ("the program returned no reward",)


def test_a_reward_that_is_no_number_ends_the_run(protocol):
    async def agent(task, model):
        return float("nan")

    with pytest.raises(RewardError, match=r"Own, trajectory q1/0: the program's reward is nan"):
        play(system_of(protocol, YES, agent))


def test_a_posted_reward_counts_even_if_the_program_dies(protocol):
    async def agent(task, model):
        async with httpx.AsyncClient(base_url=model.base_url) as api:
            assert (await api.post("/reward", json={"score": 1})).status_code == 400
            assert (await api.post("/reward", json={"reward": "nan"})).status_code == 400
            assert (await api.post("/reward", json={"reward": 1, "metrics": {"tests": "x"}})).status_code == 400
            await api.post("/reward", json={"reward": 0.5, "metrics": {"tests": 3}})
        await model.chat(messages=[user("q")])
        raise KeyError("later")

    trajectory = play(system_of(protocol, YES, agent))
    assert trajectory.reward.total == 0.5 and trajectory.reward.parts["tests"] == 3.0
    assert trajectory.stop_reason is StopReason.PROGRAM_FAILED and trajectory.trainable


def test_an_unreadable_call_is_text_and_invalid(protocol):
    async def agent(task, model):
        said = message_of(await model.chat(messages=[user("q")], tools=[SEARCH]))
        assert "tool_calls" not in said and said["content"].startswith("<tool_call>")
        return 0

    trajectory = play(system_of(protocol, lambda text, n: f"<tool_call>\n{{broken\n</tool_call>{END}", agent))
    assert trajectory.turns[0].action.kind == "invalid" and "could not be read" in trajectory.turns[0].action.error


def test_weights_that_change_between_turns_keep_their_versions(protocol):
    async def agent(task, model):
        messages = [user("q")]
        for version in range(3):
            system.engine.policy_version = version
            messages += [message_of(await model.chat(messages=messages)), user("on")]
        return 1

    system = system_of(protocol, YES, agent)
    assert [turn.policy_version for turn in play(system).turns] == [0, 1, 2]


def test_the_rollout_is_saved_and_loaded(protocol, tmp_path):
    async def agent(task, model):
        for name in "ab":
            said = message_of(await model.chat(messages=[user(name)]))
            await model.chat(messages=[user(name), said, user("on")])
        return 1

    trajectory = play(system_of(protocol, YES, agent))
    save_trajectories(tmp_path / "t.parquet", [trajectory])
    [loaded] = load_trajectories(tmp_path / "t.parquet")
    assert loaded == trajectory and split_turns(loaded) == [r.replace(episode=loaded) for r in split_turns(trajectory)]


def test_requests_are_json_of_any_shape(protocol):
    """Whatever JSON arrives, the answer is a completion or one line of error."""
    scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
    keys = "messages role content tool_calls function name arguments tools type text stop max_tokens stream_options"
    names = st.sampled_from(keys.split())
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4)
    )

    def likely(**fields):
        given = {name: st.just(field) if isinstance(field, str) else field | values for name, field in fields.items()}
        return st.fixed_dictionaries({}, optional=given) | values

    function = likely(name=st.text(max_size=3), arguments=st.sampled_from(["{}", "[", "{"]), parameters=st.just({}))
    calls = st.lists(likely(id=st.text(max_size=2), function=function), max_size=2)
    parts = st.lists(likely(type=st.sampled_from(["text", "refusal"]), text=st.text(max_size=2)), max_size=2)
    role = st.sampled_from(["user", "assistant", "tool", "system"])
    message = likely(role=role, content=st.text(max_size=3) | parts, tool_calls=calls, tool_call_id=st.text(max_size=2))
    tools = st.lists(likely(type=st.just("function"), function=function), max_size=2)
    bodies = likely(messages=st.lists(message, max_size=3), tools=tools, max_tokens=st.integers(), stop=st.text())

    @settings(max_examples=300, deadline=None)
    @given(bodies | values)
    def check(body):
        try:
            read_request(body)
        except RequestError as error:
            assert "\n" not in str(error)

    check()
