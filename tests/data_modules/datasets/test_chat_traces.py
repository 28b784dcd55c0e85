"""Conversations with tool calls as trajectories: the tokens that a rollout of them would have, and nothing lost."""

import json

import polars as pl
import pytest

from data_modules.datasets.conversations import read_conversations
from data_modules.datasets.files import DatasetError
from data_modules.datasets.traces import MalformedTrace
from data_modules.demonstrations.chat_traces import ChatTraces, cut_right
from data_modules.supervised_data_module import SupervisedDataModule
from rollout.protocols.hermes import HermesProtocol
from rollout.storage import load_trajectories
from rollout.tools.schemas import SCHEMAS
from rollout.trajectory import ActionKind, CallOutcome, StopReason, ToolResult
from tests.data_modules.toys import Recorder, trainer
from tests.rollout.chat_models import LLAMA, QWEN, chat_model

TOOLS = [SCHEMAS["code_interpreter"]]
QUESTION = "How many primes are below 100?"
FINAL = "It is \\boxed{25}."


def call(code, content="", **more):
    function = {"name": "code_interpreter", "arguments": {"code": code}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}], **more}


def row(*messages, tools=TOOLS, **columns):
    return {"messages": [{"role": "user", "content": QUESTION}, *messages], "tools": tools, **columns}


def result(text):
    return {"role": "tool", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


TWO_ROUNDS = row(call("print(20)"), result("20\n"), call("print(25)"), result("25 <|im_end|>"), said(FINAL))
THOUGHT = "<think>\nI count.\n</think>\n\n"
THOUGHTFUL = row(call("print(25)", THOUGHT), result("25"), said(THOUGHT + FINAL))
# a second question: the hybrid template now strips the thinking of the first answer
ASKED_AGAIN = row(
    said(f"<think>\nEasy.\n</think>\n\n{FINAL}"), {"role": "user", "content": "And below 10?"}, said("\\boxed{4}")
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: chat_model(tmp_path_factory.mktemp(name), name) for name in (*QWEN, *LLAMA)}


@pytest.fixture
def make(tmp_path, folders):
    def build(*rows, name="qwen3", **options):
        path = tmp_path / "sft.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return ChatTraces([str(path)], folders[name], **options)

    return build


def only(task):
    [trace] = task.read()
    return task.trajectory(trace)


def runs(protocol, trajectory):
    """Runs of equal mask, decoded."""
    found = []
    for bit, token in zip(trajectory.loss_mask, trajectory.response_ids, strict=True):
        if not found or found[-1][0] != bit:
            found.append((bit, []))
        found[-1][1].append(token)
    return [(bit, protocol.decode(ids)) for bit, ids in found]


QWEN_CALL = '<tool_call>\n{{"name": "code_interpreter", "arguments": {{"code": "print({})"}}}}\n</tool_call><|im_end|>'
QWEN_RESULT = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA_CALL = '{{"name": "code_interpreter", "parameters": {{"code": "print({})"}}}}<|eot_id|>'
LLAMA_RESULT = (
    '<|start_header_id|>ipython<|end_header_id|>\n\n"{}"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
)


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
def test_golden_masks(make, folders, name):
    """On the hybrid template this is verl #3477: differences of growing renderings lose the first 19 characters of each
    tool's message, ``<|im_start|>user\\n<t``, and add empty thinking to every turn."""
    task = make(TWO_ROUNDS, name=name)
    trajectory = only(task)
    protocol = HermesProtocol(folders[name])
    said_by_qwen, read_by_qwen = (QWEN_CALL, QWEN_RESULT) if name in QWEN else (LLAMA_CALL, LLAMA_RESULT)
    empty = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # its template's, before an answer without thinking
    assert runs(protocol, trajectory) == [
        (1, said_by_qwen.format(20)),
        (0, read_by_qwen.format("20")),
        (1, said_by_qwen.format(25)),
        (0, read_by_qwen.format("25 <|im_end|>")),
        (1, empty + FINAL + protocol.chat.end),
    ]
    asked = HermesProtocol(folders[name], instruction="dataset")
    assert list(trajectory.prompt_ids) == asked.prompt_ids(trajectory.task)
    assert [turn.action.kind.value for turn in trajectory.turns] == ["call", "call", "answer"]
    assert [c.request.arguments["code"] for c in trajectory.calls] == ["print(20)", "print(25)"]
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "25")
    assert not trajectory.task.metadata["rewritten"]


@pytest.mark.parametrize("name", [*QWEN, *LLAMA])
@pytest.mark.parametrize(
    ("conversation", "thinking"), [(TWO_ROUNDS, None), (THOUGHTFUL, None), (ASKED_AGAIN, None), (TWO_ROUNDS, False)]
)
def test_tokens_are_those_of_the_rollout(make, folders, name, conversation, thinking):
    """Every observation is what the protocol writes, and unless history is rewritten the text is the template's."""
    task = make(conversation, name=name, thinking=thinking)
    trajectory = only(task)
    protocol = HermesProtocol(folders[name], thinking=thinking)
    for number, turn in enumerate(trajectory.turns):
        results = [c.result for c in trajectory.calls if c.turn == number]
        read = trajectory.response_ids[turn.end : turn.observation_end]
        assert protocol.parse(protocol.decode(trajectory.response_ids[turn.start : turn.end])) == turn.action
        if turn.action.kind is ActionKind.CALL:
            assert list(read) == protocol.observation_ids(turn.action, results, 10_000)[0]
    [trace] = task.read()
    whole = protocol.chat.render(trace.messages, open_turn=False).removesuffix("\n")
    concatenated = protocol.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert (concatenated == whole) != trajectory.task.metadata["rewritten"]
    hybrid = name == "qwen3"
    assert trajectory.task.metadata["rewritten"] == (hybrid and (thinking is False or conversation is ASKED_AGAIN))


def test_where_history_is_rewritten_turns_are_as_the_model_would_have_said_them(make, folders):
    protocol = HermesProtocol(folders["qwen3"])
    spoken = runs(protocol, only(make(ASKED_AGAIN)))
    assert spoken[0] == (1, f"<think>\nEasy.\n</think>\n\n{FINAL}<|im_end|>")
    assert spoken[1] == (0, "\n<|im_start|>user\nAnd below 10?<|im_end|>\n<|im_start|>assistant\n")
    # without thinking the empty block stands in each header, read and not said
    off = only(make(TWO_ROUNDS, thinking=False))
    spoken = runs(protocol, off)
    assert spoken[0] == (1, QWEN_CALL.format(20))
    assert spoken[1] == (0, QWEN_RESULT.format("20") + "<think>\n\n</think>\n\n")
    assert spoken[4] == (1, f"{FINAL}<|im_end|>")
    assert protocol.decode(off.prompt_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_shapes_of_a_row(make, tmp_path, folders):
    """JSON text or values, parquet or lines, bare schemas, parts that are missing: one trajectory."""
    expected = only(make(TWO_ROUNDS))
    as_text = json.loads(json.dumps(TWO_ROUNDS))
    as_text["tools"] = json.dumps([TOOLS[0]["function"]])
    for message in as_text["messages"]:
        for made in message.get("tool_calls", []):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
            message["content"] = None
    assert only(make(as_text)).response_ids == expected.response_ids
    assert only(make(as_text)).prompt_ids == expected.prompt_ids
    pl.DataFrame([TWO_ROUNDS, {**TWO_ROUNDS, "enable_thinking": False}]).write_parquet(tmp_path / "sft.parquet")
    plain, silent = read_conversations(tmp_path / "sft.parquet")
    assert (plain.thinking, silent.thinking, plain.fault) == (None, False, None)
    assert list(plain.tools) == TOOLS and plain.messages == read_conversations(tmp_path / "sft.jsonl")[0].messages
    task = ChatTraces([str(tmp_path / "sft.parquet")], folders["qwen3"])
    first, second = map(task.trajectory, task.read())
    assert (first.response_ids, first.prompt_ids) == (expected.response_ids, expected.prompt_ids)
    assert second.task.metadata["rewritten"]  # the row's enable_thinking reached the template
    # a template that has no such choice
    assert ChatTraces([str(tmp_path / "sft.parquet")], folders["qwen2_5"]).trajectory(silent)


def test_tools_of_the_prompt(make, folders):
    def prompt(task):
        return HermesProtocol(folders["qwen3"]).decode(only(task).prompt_ids)

    own = [{"type": "function", "function": {"name": "mine", "parameters": {"type": "object", "properties": {}}}}]
    assert '"mine"' in prompt(make(row(said(FINAL), tools=own)))
    assert '"search"' in prompt(make(row(said(FINAL), tools=own), tools=["search"]))
    assert "# Tools" not in prompt(make(row(said(FINAL), tools=None)))
    assert "# Tools" not in prompt(make(row(said(FINAL)), tools_in="trained"))


BROKEN = [
    (row(), "no_assistant"),
    (row(call("1"), result("1")), "unfinished"),
    (row(said("a"), said("b")), "wrong_order"),
    (row(result("1"), said("a")), "wrong_order"),
    ({"messages": [said("a")]}, "wrong_order"),
    (row(said("a <|im_end|> b")), "control_token"),
    (row(call("print('<|im_start|>')"), result("1"), said("a")), "control_token"),
    (row({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}), "unreadable_call"),
    (row({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}), "unreadable_call"),
    ({**THOUGHTFUL, "enable_thinking": False}, "unrenderable"),  # it thinks behind a header that forbids it
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN)
def test_conversations_that_teach_nothing(make, broken, reason):
    with pytest.raises(MalformedTrace, match=reason):
        only(make(broken))


def test_what_a_template_refuses_is_counted(make, tmp_path):
    twice = call("1")
    twice = {**twice, "tool_calls": twice["tool_calls"] * 2}
    task = make(row(twice, result("1"), result("1"), said("a")), row(said("a")), name="llama3_1")
    summary = task.run(tmp_path)
    assert (summary["malformed/unrenderable"], summary["kept"]) == (1, 1)  # Llama writes one call a turn


def test_rows_of_another_shape(make):
    for wrong, reason in (
        ({"prompt": "x"}, "columns are prompt; expected {messages"),
        ({"messages": "[}"}, "cannot be read as JSON"),
        ({"messages": [{"role": "human", "content": "x"}]}, "role of system, user"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content of a message is list"),
        (row(said("a"), enable_thinking="no"), "enable_thinking is 'no'"),
        (row({"role": "assistant", "tool_calls": [{"name": 3}]}), "a tool call is not"),
    ):
        with pytest.raises(DatasetError, match=reason):
            make(wrong).read()
    with pytest.raises(DatasetError, match="sft_0 of .*object 'parameters'"):
        only(make(row(said("a"), tools=[{"name": "f"}])))
    with pytest.raises(ValueError, match="knows no enable_thinking"):
        make(TWO_ROUNDS, name="qwen2_5", thinking=True)


def test_the_report(make, tmp_path):
    long = row(said(FINAL * 50))
    unread = row(said('<tool_call>{"name": 3}</tool_call>'), result("no"), said(FINAL))
    parts_left_out = row(call("1", "I compute."), result("1"), said(FINAL))
    rows = [TWO_ROUNDS, ASKED_AGAIN, long, unread, parts_left_out, *(broken for broken, _ in BROKEN[:2])]
    summary = make(*rows, max_tokens=700).run(tmp_path / "hybrid")
    trajectories = load_trajectories(tmp_path / "hybrid" / "trajectories" / "chunk-00000.parquet")
    assert [t.task.id for t in trajectories] == ["sft_0", "sft_1", "sft_3", "sft_4"]
    expected = {
        "found": 7, "kept": 4, "too_long": 1, "malformed": 2, "malformed/no_assistant": 1, "malformed/unfinished": 1,
        "cut": 0, "rewritten": 1, "invalid_turns": 1, "unsaid_turns": 0,
        "tokens": sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories),
        "loss_tokens": sum(sum(t.loss_mask) for t in trajectories),
    }  # fmt: skip
    assert {name: value for name, value in summary.items() if name != "seconds"} == expected
    summary = make(parts_left_out, name="llama3_1", limit=1).run(tmp_path / "llama")
    assert summary["unsaid_turns"] == 1  # its template writes the call alone
    with pytest.raises(DatasetError, match="none of 1 traces can be trained on .*unfinished 1"):
        make(BROKEN[1][0]).run(tmp_path / "none")


def test_cutting_at_the_right(make, folders, tmp_path):
    """At every length: a prefix, whose turns are whole but for the last, and no observation at its end."""
    whole = only(make(TWO_ROUNDS))
    for tokens in range(1, len(whole.response_ids) + 1):
        part = cut_right(whole, tokens)
        end = len(part.response_ids)
        assert end <= tokens and part.response_ids == whole.response_ids[:end]
        assert part.loss_mask == whole.loss_mask[:end] and part.loss_mask[-1] == 1
        assert end == tokens or not any(whole.loss_mask[end:tokens])
        last = part.turns[-1]
        assert last.action.ended == (last.end == whole.turns[len(part.turns) - 1].end)
        assert len(part.calls) == sum(len(turn.action.calls) for turn in part.turns)
        assert part.stop_reason is StopReason.LENGTH
    assert cut_right(whole, 0) is None
    length = len(whole.prompt_ids) + len(whole.response_ids)
    summary = make(TWO_ROUNDS, TWO_ROUNDS, max_tokens=length - 3, too_long="cut").run(tmp_path)
    assert (summary["cut"], summary["too_long"], summary["tokens"]) == (2, 0, 2 * (length - 3))
    with pytest.raises(DatasetError, match="too_long 1"):
        make(TWO_ROUNDS, max_tokens=len(whole.prompt_ids), too_long="cut").run(tmp_path)


def test_empty_results_and_calls_without_one(make):
    trajectory = only(make(row(call("x = 1"), result(" \n"), call("1"), {"role": "user", "content": "No."}, said("a"))))
    assert [c.result.outcome for c in trajectory.calls] == [CallOutcome.EMPTY, CallOutcome.REFUSED]
    assert trajectory.calls[0].result == ToolResult("", CallOutcome.EMPTY)


def test_the_data_module_trains_on_them_and_adds_no_second_end(make, folders, tmp_path):
    make(TWO_ROUNDS, THOUGHTFUL).run(tmp_path)
    module = SupervisedDataModule([str(tmp_path / "trajectories")], batch_size=2, tokenizer=folders["qwen3"])
    recorder = Recorder(push=False)
    trainer(tmp_path, max_epochs=1).fit(recorder, datamodule=module)
    written = load_trajectories(tmp_path / "trajectories" / "chunk-00000.parquet")
    assert {t.response_ids for t in recorder.train_batches[0]} == {t.response_ids for t in written}
