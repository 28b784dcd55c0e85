"""Readers of call formats: hand-written turns, calls that cannot be read, and the same results as vLLM's parsers."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from rollout.protocols.call_formats import (
    MalformedCall,
    UnclosedThinking,
    after_thinking,
    hermes_calls,
    thinking_tags,
    typed,
)
from rollout.protocols.call_readers import LEFT_OUT, NATIVE, PROBES, call_reader
from rollout.trajectory import ToolRequest
from tests.rollout.chat_models import chat_model

THINK = ("<think>", "</think>")
CODE = 'if a < 3 and b > 2:\n    print("</tool>")\n'
QWEN = "<tool_call>\n<function=probe>\n{}</function>\n</tool_call>"
GLM = "<tool_call>probe\n{}</tool_call>"
KIMI = "<|tool_call_begin|>functions.probe:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def qwen(**values):
    return QWEN.format("".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items()))


def glm(**values):
    return GLM.format("".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()))


def mistral(**values):
    return f"[TOOL_CALLS]probe[ARGS]{json.dumps(values)}"


def kimi(**values):
    return KIMI.format(json.dumps(values))


def harmony(**values):
    return f" to=functions.probe<|channel|>commentary json<|message|>{json.dumps(values)}"


WRITERS = {"qwen3_coder": qwen, "glm45": glm, "mistral": mistral, "kimi_k2": kimi, "harmony": harmony}
UNREADABLE = {
    "qwen3_coder": [
        ("<tool_call>", "no <function=NAME>"),
        ("<tool_call>\n<function=probe>\n<parameter=text>\na", "no </parameter>"),
        ("<tool_call>\n<function=probe>\nhello</function></tool_call>", "no </function>"),
        (qwen(text="a") + "<tool_call>{}", "no <function=NAME>"),
        (qwen(text="a").removeprefix("<tool_call>"), "</tool_call> without <tool_call>"),
    ],
    "glm45": [
        ("<tool_call></tool_call>", "no name"),
        ("<tool_call>probe<arg_key>text</arg_key><arg_value>a", "no </arg_value>"),
        ("<tool_call>probe<arg_key>text</arg_key>a</tool_call>", "no </tool_call> after"),
        (glm(text="a").removeprefix("<tool_call>"), "</tool_call> without <tool_call>"),
    ],
    "mistral": [
        ("[TOOL_CALLS]", "no name"),
        ("[TOOL_CALLS]probe[ARGS]{", "not valid JSON"),
        ("[TOOL_CALLS]probe[ARGS][]", "found a list"),
        ("[TOOL_CALLS]probe[ARGS]{} more", "text after"),
        ('[TOOL_CALLS][{"name": "probe"}]', '"arguments" is missing'),
    ],
    "kimi_k2": [
        ("<|tool_call_begin|>probe", "no name"),
        (KIMI.format("[]"), "found a list"),
        (KIMI.format("{} x"), "no <.tool_call_end.>"),
    ],
    "harmony": [
        ("<|channel|>commentary to=functions.probe<|message|>{", "not valid JSON"),
        ("<|channel|>commentary to=functions.probe<|message|>[]", "one JSON object"),
        ("<|channel|>analysis<|message|>I think.", "neither a call"),
        ("plain", "neither a call"),
    ],
}


def read(name, turn):
    return call_reader(name, None, PROBES, THINK).read(turn)


@pytest.mark.parametrize("name", WRITERS)
def test_calls(name):
    write = WRITERS[name]
    for arguments in ({}, {"text": CODE}, {"text": "12"}, {"text": "a", "count": 3, "ratio": 2.5, "exact": True}):
        assert read(name, write(**arguments))[1] == (ToolRequest("probe", arguments),)
    nested = {"where": {"a": [1, {"b": "<c>"}]}, "tags": ["x", "y z"]}
    shown = nested if name not in ("qwen3_coder", "glm45") else {k: json.dumps(v) for k, v in nested.items()}
    assert read(name, write(**shown))[1] == (ToolRequest("probe", nested),)
    if name != "harmony":
        said, calls = read(name, f"<think>\n{write(text='no')}\n</think>Now.\n{write(text='a')}")
        assert said.startswith("Now.") and [call.arguments for call in calls] == [{"text": "a"}]
        assert read(name, write(text="a") + write(text="b"))[1][1].arguments == {"text": "b"}
        assert read(name, "It is \\boxed{4}.") == ("It is \\boxed{4}.", ())
        with pytest.raises(UnclosedThinking):
            read(name, f"<think> {write(text='a')}")


@pytest.mark.parametrize(("name", "turn", "reason"), [(n, *case) for n, cases in UNREADABLE.items() for case in cases])
def test_calls_that_cannot_be_read_are_told(name, turn, reason):
    with pytest.raises(MalformedCall, match=reason):
        read(name, turn)


def test_harmony_channels():
    thought = "<|channel|>analysis<|message|>I look. to=functions.no<|end|><|start|>assistant"
    assert read("harmony", f"{thought}{harmony(text='a')}")[1] == (ToolRequest("probe", {"text": "a"}),)
    assert read("harmony", f"{thought}<|channel|>final<|message|>It is \\boxed{{4}}.") == ("It is \\boxed{4}.", ())


def test_mistral_lists_and_ids():
    listed = '[TOOL_CALLS][{"name": "probe", "arguments": {"text": "[TOOL_CALLS]"}, "id": "000000000"}]'
    assert read("mistral", listed)[1] == (ToolRequest("probe", {"text": "[TOOL_CALLS]"}),)
    assert read("mistral", "[TOOL_CALLS]probe[CALL_ID]000000001[ARGS]{}")[1] == (ToolRequest("probe", {}),)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("true", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["string", "null"]}, None),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("[1]", {"type": "array"}, [1]),
        ("[1", {"type": "array"}, "[1"),
        ("{}", {"type": "string"}, "{}"),
        ('["\\ud83d"]', {"type": "array"}, ["\ufffd"]),  # half a pair could not be sent or saved
        ("NaN", {"type": "number"}, "NaN"),
        ("3", None, "3"),
    ],
)
def test_arguments_are_typed_by_the_schema(text, schema, value):
    found = typed(text, schema)
    assert (type(found), found) == (type(value), value)


def test_thinking_is_a_block_at_the_beginning():
    for text, said in (
        ("<think>a</think>b", "b"),
        ("\n <think>a</think>\n<think>b</think>c", "c"),
        ("a</think>b", "b"),
        ("b <think>c</think>", "b <think>c</think>"),
        ("<tool_call>{}</tool_call></think>", "<tool_call>{}</tool_call></think>"),
        ("<think>a</think>b </think> c", "b </think> c"),
    ):
        assert after_thinking(text) == said
    assert thinking_tags("{{ '[THINK]' }}", {}) == ("[THINK]", "[/THINK]")
    assert thinking_tags("", {"<seed:think>": 1})[0] == "<seed:think>" and thinking_tags("", {}) == THINK


# --- vLLM's own parsers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = AutoTokenizer.from_pretrained(chat_model(tmp_path_factory.mktemp("model"), "qwen3"))
    tags = ["[TOOL_CALLS]", "[ARGS]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
    made.add_tokens([*tags, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "mistral", "kimi_k2"])
def test_ours_read_what_vllms_read(tokenizer, name):
    from rollout.protocols.call_readers import VLLMCalls

    theirs, write = VLLMCalls(name, tokenizer, PROBES), WRITERS[name]
    frame = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>" if name == "kimi_k2" else "{}"
    for arguments in ({}, {"text": CODE}, {"text": "12"}, {"text": "a", "count": 3, "exact": True}, {"other": "3"}):
        turn = frame.format(write(**arguments))
        assert theirs(turn) == read(name, turn)[1], arguments
    assert len(theirs(frame.format(write(text="a") + write(text="b")))) == 2


@pytest.mark.slow
def test_a_parser_of_vllms_says_what_it_cannot_read(tokenizer):
    tokenizer.add_tokens(["<minimax:tool_call>", "</minimax:tool_call>"])
    reader = call_reader("minimax_m2", tokenizer, PROBES, THINK)
    reader.beginning = reader.calls.beginning = "<minimax:tool_call>"
    whole = '<minimax:tool_call>\n<invoke name="probe">\n<parameter name="count">3</parameter>\n</invoke>\n'
    whole += "</minimax:tool_call>"
    assert reader.read(f"<think>a</think>{whole}")[1] == (ToolRequest("probe", {"count": 3}),)
    assert reader.read("no call")[1] == ()
    with pytest.raises(MalformedCall, match="1 begun, 0 complete"):
        reader.read("<minimax:tool_call>\nprobe</minimax:tool_call>")
    with pytest.raises(MalformedCall, match="more than 1000 tags"):
        reader.read(whole * 1000)
    for name, reason in (("qwen3_codr", "expected auto or one of hermes, "), ("dots", "expected auto or one of")):
        with pytest.raises(ValueError, match=reason):
            call_reader(name, tokenizer, PROBES, THINK)
    with pytest.raises(ValueError, match="vLLM's parser .* does not take this tokenizer"):
        call_reader("llama3_json", tokenizer, PROBES, THINK)


@pytest.mark.slow
def test_importing_vllms_parsers_changes_nothing_else():
    """Not its environment, which children inherit, and not the log of the root."""
    script = (
        "import logging, os, torch, transformers\n"
        "state = lambda: (dict(os.environ), torch.get_num_threads(), logging.root.level, logging.root.handlers)\n"
        "before = state()\n"
        "from rollout.protocols.call_readers import names; names()\n"
        "assert before == state()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr


def test_own_formats_need_no_vllm():
    script = (
        "import sys; from rollout.protocols.call_readers import NATIVE, call_reader\n"
        "for name in NATIVE: call_reader(name, None, [], ('<think>', '</think>'))\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not set(NATIVE) & LEFT_OUT


def test_a_number_without_its_closing_tag_is_reported_as_unclosed():
    """The model reads the message, so that another order of checks would change every later turn."""
    with pytest.raises(MalformedCall, match="^no </tool_call> after the JSON object$"):
        hermes_calls('<tool_call>\n08.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
