"""Which requests continue a conversation, and the rows that come of them."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.base import Generation
from rollout.programs.session import Session
from rollout.protocols.call_formats import OPEN, glm45_calls
from rollout.trajectory import ActionKind, StopReason, split_turns
from tests.rollout.programs.playing import END, SEARCH, Sampler, call, play, system_of, user


def message_of(answer: dict) -> dict:
    return answer["choices"][0]["message"]


def rows_of(system) -> tuple[list, list]:
    """The rows of one rollout, and its trajectory. The turns of the rows are what the engine has sampled, each once, in
    the contexts that it has read."""
    trajectory = play(system)
    rows, turns = split_turns(trajectory), []
    for row in rows:
        ids, start = (*row.prompt_ids, *row.response_ids), len(row.prompt_ids)
        turns += [(ids[: start + t.start], ids[start + t.start : start + t.end]) for t in row.turns]
        covered = {i for turn in row.turns for i in range(turn.start, turn.end)}
        assert covered == {i for i, trained in enumerate(row.loss_mask) if trained}
    assert sorted(turns) == sorted(system.engine.sampled)
    return rows, trajectory


def test_a_conversation_with_tools_is_one_row_of_the_engines_ids(protocol):
    async def agent(task, model):
        messages = [user(task.question)]
        for _ in range(3):
            said = message_of(await model.chat(messages=messages, tools=[SEARCH]))
            messages.append(said)
            if not said.get("tool_calls"):
                return 1.0
            messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "25 <|im_end|>"})
        return 0.0

    system = system_of(
        protocol, lambda text, n: call(query=f"primes {n}") if n < 2 else f"It is \\boxed{{25}}.{END}", agent
    )
    [row], trajectory = rows_of(system)
    assert row is trajectory and trajectory.turns[0].prompt_ids is None, (
        "an ordinary trajectory: all algorithms take it"
    )
    assert [turn.action.kind for turn in row.turns] == [ActionKind.CALL, ActionKind.CALL, ActionKind.ANSWER]
    assert trajectory.reward.total == 1.0 and trajectory.stop_reason is StopReason.PROGRAM_DONE
    assert [c.result.text for c in trajectory.calls] == ["25 <|im_end|>"] * 2
    # between the turns is what the template writes, a quoted control token as text
    text = protocol.decode(row.response_ids[row.turns[0].end : row.turns[0].observation_end])
    assert (
        text
        == "\n<|im_start|>user\n<tool_response>\n25 <|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    end = protocol.tokenizer.convert_tokens_to_ids(END)
    assert row.response_ids[row.turns[0].end : row.turns[0].observation_end].count(end) == 1
    canonical = protocol.tokenizer.encode(protocol.decode(row.response_ids), add_special_tokens=False)
    assert tuple(canonical) != row.response_ids, "the test's ids are canonical, so it shows nothing"


CHANGES = {
    "content": (lambda m: m[1].update(content="other"), "the content of message 2 (assistant) differs"),
    "question": (lambda m: m[0].update(content="Question?"), "the content of message 1 (user) differs"),
    "call": (lambda m: m[1]["tool_calls"][0]["function"].update(arguments='{"query": "x"}'), "the calls of message 2"),
    "name": (lambda m: m[1]["tool_calls"][0]["function"].update(name="find"), "the calls of message 2"),
    "no call": (lambda m: m[1].pop("tool_calls"), "the calls of message 2 (assistant) differs"),
    "system": (lambda m: m.insert(0, {"role": "system", "content": "s"}), "the role of message 1 (system) differs"),
    "assistant at the end": (lambda m: m.append({"role": "assistant", "content": "x"}), "it ends with other messages"),
    "thinking": (lambda m: m[1].update(reasoning_content="I guess."), "thinking differs"),
}
SAME = {
    "nothing": lambda m: None,
    "nulls": lambda m: m[1].update(function_call=None, refusal=None, audio=None, name=None),
    "empty content": lambda m: m[1].update(content=""),
    "parts": lambda m: m[0].update(content=[{"type": "text", "text": m[0]["content"]}]),
    "new ids": lambda m: (m[1]["tool_calls"][0].update(id="x"), m[2].update(tool_call_id="x")),
    "order of keys": lambda m: m[1]["tool_calls"][0].update(
        function=dict(reversed(m[1]["tool_calls"][0]["function"].items()))
    ),
    "no thinking": lambda m: m[1].pop("reasoning_content"),
    "empty thinking": lambda m: m[1].update(reasoning_content=""),
    "spaces in arguments": lambda m: m[1]["tool_calls"][0]["function"].update(arguments='{ "query" :"primes"}'),
}


def after(change, protocol):
    """Why the second request was rendered as a whole, or "", after ``change`` of its messages."""

    async def agent(task, model):
        messages = [user(task.question)]
        messages.append(message_of(await model.chat(messages=messages, tools=[SEARCH])))
        messages.append({"role": "tool", "tool_call_id": messages[1]["tool_calls"][0]["id"], "content": "25"})
        messages = copy.deepcopy(messages)
        change(messages)
        await model.chat(messages=messages, tools=[SEARCH])
        return 0

    said = [f"<think>\nHm.\n</think>\n\n{call()}", f"25{END}"]
    system = system_of(protocol, lambda text, n: said[n], agent)
    rows, _ = rows_of(system)
    [report] = system.agent_loop.reports
    turns = sorted((turn for chain in report.chains for turn in chain), key=lambda turn: turn.number)
    assert len(rows) == (2 if turns[1].why else 1)
    return turns[1].why


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_conversation_is_rendered_anew(name, protocol):
    change, reason = CHANGES[name]
    assert after(change, protocol).startswith(reason)


@pytest.mark.parametrize("name", SAME)
def test_what_clients_send_back_continues(name, protocol):
    assert after(SAME[name], protocol) == ""


def test_other_tools_are_another_conversation(protocol):
    async def agent(task, model):
        said = message_of(await model.chat(messages=[user("a")], tools=[SEARCH]))
        await model.chat(messages=[user("a"), said, user("b")])
        return 0

    system = system_of(protocol, lambda text, n: f"yes{END}", agent)
    rows, _ = rows_of(system)
    assert len(rows) == 2 and system.agent_loop.reports[0].chains[1][0].why == "other tools"


def sub_agents(order, protocol):
    """Three conversations of two turns each, whose requests are sent in the given order."""

    async def agent(task, model):
        talks = {name: [user(f"Task {name}")] for name in "abc"}
        for name in order:
            said = message_of(await model.chat(messages=talks[name]))
            talks[name] += [said, user("Go on.")]
        return 1

    def say(text, n):
        return f"turn {text.count('<|im_start|>assistant')} of {text[text.index('Task') :][:6]}{END}"

    rows, trajectory = rows_of(system_of(protocol, say, agent))
    assert len(rows) == 3 and all(len(row.turns) == 2 for row in rows)
    return {(row.prompt_ids, protocol.decode(row.response_ids), row.loss_mask.count(1) > 0) for row in rows}


def test_sub_agents_in_any_order_give_the_same_conversations(protocol):
    orders = sorted(set(itertools.permutations("aabbcc")))[::15]
    texts = [{(prompt, text) for prompt, text, _ in sub_agents(order, protocol)} for order in orders]
    assert len(orders) == 6 and all(found == texts[0] for found in texts)


def test_seeds_depend_on_prompts_and_not_on_the_order_of_requests(protocol):
    def seeds(names):
        async def agent(task, model):
            await asyncio.gather(*(model.chat(messages=[user(name)]) for name in names))
            return 1

        system = system_of(protocol, lambda text, n: f"yes{END}", agent)
        play(system)
        return {(r.token_ids, r.sampling.seed) for r in system.engine.requests}

    assert seeds("abc") == seeds("cab")
    assert len({seed for _, seed in seeds("aab")}) == 3, "a repeated request is another sample"


def test_a_second_continuation_of_a_turn_is_a_row_whose_prompt_has_that_turn(protocol):
    async def agent(task, model):
        head = [user("a"), message_of(await model.chat(messages=[user("a")]))]
        for text in ("b", "c"):
            await model.chat(messages=[*head, user(text)])
        return 1

    rows, trajectory = rows_of(system_of(protocol, lambda text, n: f"turn {n}{END}", agent))
    assert [len(row.turns) for row in rows] == [2, 1]
    first = rows[0].response_ids[: rows[0].turns[0].end]
    assert rows[1].prompt_ids[: len(rows[0].prompt_ids) + len(first)] == (*rows[0].prompt_ids, *first)


def test_a_compacted_history_begins_a_row(protocol):
    async def agent(task, model):
        messages = [user("a long task")]
        for _ in range(2):
            messages += [message_of(await model.chat(messages=messages)), user("on")]
        summary = [user("a long task, so far: x")]
        messages = [*summary, message_of(await model.chat(messages=summary)), user("on")]
        await model.chat(messages=messages)
        return 1

    rows, _ = rows_of(system_of(protocol, lambda text, n: f"turn {n}{END}", agent))
    assert [len(row.turns) for row in rows] == [2, 2]


def test_history_by_the_template_makes_a_row_where_the_template_changes_the_past(folder):
    from rollout.programs.protocol import ProgramProtocol

    async def agent(task, model):
        messages = [user("a")]
        messages += [message_of(await model.chat(messages=messages)), user("b")]
        await model.chat(messages=messages)
        return 1

    say = lambda text, n: f"<think>\nlong\n</think>\n\nturn {n}{END}"  # noqa: E731
    protocol = ProgramProtocol(folder, history="template")
    rows, _ = rows_of(system_of(protocol, say, agent))
    assert len(rows) == 2 and "long" not in protocol.decode(rows[1].prompt_ids)
    rows, _ = rows_of(system_of(ProgramProtocol(folder), say, agent))
    assert len(rows) == 1


def test_results_of_parallel_calls_come_in_the_order_of_the_calls(protocol):
    two = (call(query="a") + call(query="b")).replace(f"</tool_call>{END}<tool_call>", "</tool_call>\n<tool_call>")

    async def agent(task, model):
        said = message_of(await model.chat(messages=[user("q")], tools=[SEARCH]))
        results = [{"role": "tool", "tool_call_id": c["id"], "content": json.loads(c["function"]["arguments"])["query"]}
                   for c in reversed(said["tool_calls"])]  # fmt: skip
        await model.chat(messages=[user("q"), said, *results], tools=[SEARCH])
        return 1

    [row], trajectory = rows_of(system_of(protocol, lambda text, n: two if n == 0 else f"ok{END}", agent))
    assert [(c.request.arguments["query"], c.result.text) for c in trajectory.calls] == [("a", "a"), ("b", "b")]
    assert protocol.decode(row.response_ids).count("\na\n</tool_response>\n<tool_response>\nb\n") == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("nrbc"), st.integers(0, 9)), min_size=1, max_size=9))
def test_random_conversations(protocol, steps):
    """Each step begins a conversation (n), continues one (r), repeats a request (b) or edits a history (c)."""

    async def agent(task, model):
        talks = [[user("0")]]
        for kind, number in steps:
            at = number % len(talks)
            if kind == "n":
                talks.append([user(str(len(talks)))])
                at = -1
            elif kind == "c":
                edited = copy.deepcopy(talks[at])
                edited[0]["content"] += "!"
                talks.append(edited)
                at = -1
            said = message_of(await model.chat(messages=talks[at]))
            if kind != "b":
                talks[at] = [*talks[at], said, user("on")]
        return 1

    def say(text, n):
        return f"<think>\n{n}\n</think>\n\nturn {n % 3}{END}"

    rows, trajectory = rows_of(system_of(protocol, say, agent))
    assert sum(len(row.turns) for row in rows) == len(steps)


def test_turns_that_overlap_in_time(protocol):
    async def agent(task, model):
        async def talk(name):
            messages = [user(name)]
            for _ in range(3):
                messages += [message_of(await model.chat(messages=messages)), user("on")]

        await asyncio.gather(*map(talk, "abcd"))
        return 1

    engine = Sampler(protocol, lambda text, n: f"turn {n}{END}", latency=lambda ids: (sum(ids) % 7) / 1000)
    rows, _ = rows_of(system_of(protocol, engine, agent))
    assert [len(row.turns) for row in rows] == [3] * 4


@pytest.mark.parametrize(
    ("text", "ended", "finish"),
    [
        ("<tool_call>sear", False, "length"),  # GLM's form reads a name alone as a call
        ("<tool_call>send\n<arg_key>to</arg_key>\n<arg_value>Bob</arg_value>\n", False, "length"),
        ("<tool_call>send\n<arg_key>to</arg_key>\n<arg_value>Bob</arg_value>\n", True, "tool_calls"),
        ("<tool_call>send\n<arg_key>to</arg_key>\n<arg_value>Bob</arg_value>\n</tool_call>", False, "tool_calls"),
    ],
)
def test_a_call_that_was_cut_is_not_executed(text, ended, finish):
    session = object.__new__(Session)
    session.protocol = SimpleNamespace(decode=lambda ids: text)
    reader = SimpleNamespace(read=lambda turn: (turn, glm45_calls(turn, {})), turn=None, beginning=OPEN, form="glm45")
    chat = SimpleNamespace(without_end=lambda turn: (turn, ended), opened="", thinking_tags=())
    prompt = SimpleNamespace(form=SimpleNamespace(chat=chat, reader=reader), ids=(1, 2))
    action, reply = session._read(prompt, Generation((3,), (0.0,), "length", 0))
    assert (reply.finish_reason, bool(reply.calls)) == (finish, finish == "tool_calls")
    assert action.kind is (ActionKind.CALL if reply.calls else ActionKind.INVALID)
