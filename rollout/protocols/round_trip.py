"""Chooses the reader of a chat template's tool calls: calls are rendered by the template and read back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollout.protocols.call_readers import LLAMA3, NATIVE, VERL, CallReader, VLLMCalls, call_reader, names
from rollout.protocols.chat_boundaries import ChatBoundaries
from rollout.protocols.tool_calls import after_thinking
from rollout.trajectory import ToolRequest

Calls = tuple[ToolRequest, ...]

_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
PROBES = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probe of the call format.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in (("probe", _TYPES), ("empty_probe", {}))
]
SINGLE, EMPTY, TWO = "text", "no arguments", "two calls"
MANY = 3  # names in a message; all others are counted
_ARGUMENTS: dict[str, dict[str, Any]] = {
    SINGLE: {"text": "plain words"},
    "digits": {"text": "12"},
    "number": {"count": 3, "ratio": 2.5},
    "boolean": {"exact": True},
    "object": {"where": {"city": {"names": ["a", 1]}, "exact": False}},
    "list": {"tags": ["a", "b c"]},
    "quotes": {"text": "say \"yes\", 'no' or \\n"},
    "lines": {"text": "for x in y:\n    if a < b and b > c:\n        print(x)\n\nprint(2)"},
    "unicode": {"text": "Zürich 東京 😀"},
    "several": {"text": "a", "count": 1, "exact": False},
}
CASES: dict[str, Calls] = {
    **{name: (ToolRequest("probe", arguments),) for name, arguments in _ARGUMENTS.items()},
    EMPTY: (ToolRequest("empty_probe", {}),),
    TWO: (ToolRequest("probe", {"text": "first"}), ToolRequest("probe", {"text": "second"})),
}
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def choose_reader(chat: ChatBoundaries, call_format: str, schemas: Sequence[dict[str, Any]]) -> tuple[CallReader, bool]:
    """The reader of the calls that a template writes, and whether it can write two in a turn.

    Args:
        chat: its ``arguments_as_text`` is set to what survives.
        call_format: a name of `call_readers.names`, or ``auto``: the first that reads back whatever the template can
            write.
        schemas: of the tools that may be called.

    Raises:
        ValueError: the calls are not read back; the message names the formats that were tried.
    """
    tried: list[str] = []
    nearest: tuple[int, str] = (0, "")
    for group in _groups(chat, call_format):
        tried += group
        for as_text in (False, True):
            chat.arguments_as_text = as_text
            turns = written_cases(chat)
            for name in group if turns else ():
                try:
                    reader = _reader(chat, name, PROBES, turns)
                except ValueError:
                    if call_format != "auto":
                        raise
                    continue
                if name == LLAMA3 and not turns[SINGLE].lstrip().startswith(("{", "<|python_")):
                    continue  # tags of another format around the JSON that it finds
                lost = [case for case, turn in turns.items() if not survives(reader, turn, CASES[case])]
                if not lost:
                    return _reader(chat, name, schemas, turns), TWO in turns
                if len(turns) - len(lost) > nearest[0]:
                    nearest = (len(turns) - len(lost), f"; {name} loses {', '.join(lost)}")
    if len(tried) > MANY:
        tried = [*tried[:MANY], f"{len(tried) - MANY} parsers of vLLM's"]
    raise ValueError(
        f"{chat.where} writes tool calls that are not read back; tried {', '.join(tried)}{nearest[1]}. Expected a "
        "call_format that reads what the template writes (auto looks for it), or tools_in: system, which brings its own"
    )


def _groups(chat: ChatBoundaries, call_format: str) -> Iterator[list[str]]:
    """Names to try. vLLM's come last, because importing them takes seconds."""
    if call_format != "auto":
        yield [call_format]
    else:
        native = [name for name in NATIVE if name != VERL]
        yield native
        yield [name for name in names() if name not in NATIVE]


def _reader(chat: ChatBoundaries, name: str, schemas: Sequence[dict[str, Any]], turns: dict[str, str]) -> CallReader:
    reader = call_reader(name, chat.tokenizer, schemas, chat.thinking_tags)
    if isinstance(reader.calls, VLLMCalls):
        tags = chat.thinking_tags
        single, empty, two = (
            after_thinking(turns.get(case, ""), *tags, call="").lstrip() for case in (SINGLE, EMPTY, TWO)
        )
        shared = os.path.commonprefix([single, empty])
        tag = _TAG.match(shared)
        reader.beginning = reader.calls.beginning = tag[0] if tag else shared
        reader.calls.anywhere = bool(tag)
        reader.calls.one_each = bool(tag) and two.count(tag[0]) == len(CASES[TWO])
        reader.form = single
    return reader


def written_cases(chat: ChatBoundaries) -> dict[str, str]:
    """The turns of ``CASES`` as the template writes them, without those that it cannot express."""
    turns: dict[str, str] = {}
    for case, calls in CASES.items():
        try:
            turn = chat.written_call(calls, PROBES)
        except ValueError:
            if case != TWO:
                return {}
            continue
        if case != TWO or all(str(call.arguments["text"]) in turn for call in calls):
            turns[case] = turn
    return turns


def survives(reader: CallReader, turn: str, calls: Calls) -> bool:
    """Whether the reader finds just these calls, with equal values of equal types."""
    try:
        _, found = reader.read(turn)
    except ValueError:
        return False
    return _exact(found) == _exact(calls)


def _exact(calls: Calls) -> str:
    """JSON, because it keeps 1, 1.0 and true apart."""
    return json.dumps([(call.name, call.arguments) for call in calls], sort_keys=True)
