"""Reads files of conversations with tool calls: {messages, tools[, enable_thinking]} per row, OpenAI's form.

``messages`` holds {role, content[, tool_calls][, reasoning_content]}, roles system, user,
assistant, tool; ``tools`` schemas of functions. Arguments of calls are objects or JSON text; either column may be JSON
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.tables import open_table
from common.text import strict_json
from data_modules.datasets.files import DatasetError, read_each, read_rows

Message = dict[str, Any]

SHAPE = "{messages: [{role, content[, tool_calls]}, ..][, tools][, enable_thinking]}"
ROLES = ("system", "user", "assistant", "tool")
# What may stand before each role ("" is the beginning of the conversation).
BEFORE = {
    "system": ("",),
    "user": ("", "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    messages: tuple[Message, ...]  # role, content (text) and, of an assistant, perhaps tool_calls, reasoning_content
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None  # the row's enable_thinking
    fault: str | None = None  # why nothing can be learnt from it: see ``_fault`` and ``_calls``


def read_conversations(path: Path) -> list[Conversation]:
    """Read all rows of a .parquet, .jsonl or .json file as conversations. Their ids are ``<file name>_<row>``.

    Raises:
        DatasetError: no such file, a file that cannot be read, or a row of another shape.
    """
    rows = read_rows(path)
    typed = open_table(path).form == "parquet"  # whose rows have every key of any row, as null
    return read_each(path, rows, lambda number, row: _conversation(path, number, row, typed))


def _conversation(path: Path, number: int, row: dict[str, Any], typed: bool) -> Conversation:
    where, identity = f"{path}, row {number}", f"{path.stem}_{number}"
    if "messages" not in row:
        raise DatasetError(f"{where}: the columns are {', '.join(row)}; expected {SHAPE}")
    messages = _list(where, "messages", _parsed(where, "messages", row["messages"]))
    tools = [_parsed(where, "tools", t) for t in _list(where, "tools", _parsed(where, "tools", row.get("tools") or []))]
    thinking = row.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise DatasetError(f"{where}: enable_thinking is {thinking!r}; expected true, false or null")
    try:
        read = tuple(_message(where, message, typed) for message in messages)
    except _UnreadableCall:
        return Conversation(identity, (), fault="unreadable_call")
    schemas = tuple(_without_nulls(tool) if typed else tool for tool in tools)
    return Conversation(identity, read, schemas, thinking, _fault([message["role"] for message in read]))


def _fault(roles: Sequence[str]) -> str | None:
    """Return why a conversation with these message ``roles`` cannot be trained on, or None: ``no_assistant``;
    ``unfinished`` (the last message is not the assistant's); ``wrong_order`` (such as two assistant messages in a row,
    or a tool result without a call)."""
    if "assistant" not in roles:
        return "no_assistant"
    if roles[-1] != "assistant":
        return "unfinished"
    if any(before not in BEFORE[role] for before, role in zip(["", *roles], roles, strict=False)):
        return "wrong_order"
    return None


def _message(where: str, message: Any, typed: bool) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise DatasetError(f"{where}: a message is not an object with a role of {', '.join(ROLES)}")
    role, content = message["role"], message.get("content")
    if content is not None and not isinstance(content, str):
        raise DatasetError(f"{where}: the content of a message is {type(content).__name__}, expected text")
    content = content or ""
    read: Message = {"role": role, "content": content.strip() if role == "tool" else content}  # stripped in a rollout
    if role == "assistant":
        if isinstance(message.get("reasoning_content"), str):
            read["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            read["tool_calls"] = [_call(where, call, typed) for call in _list(where, "tool_calls", calls)]
    return read


class _UnreadableCall(ValueError):
    """The arguments of a tool call are not a JSON object."""


def _call(where: str, call: Any, typed: bool) -> dict[str, Any]:
    """Read a tool call and parse its arguments into an object. Templates would write text unchanged or (Qwen2.5) quoted
    again.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DatasetError(f"{where}: a tool call is not {{type, function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError) as error:
            raise _UnreadableCall from error
    elif typed and arguments is not None:
        arguments = _without_nulls(arguments)
    if not isinstance(arguments, dict):
        raise _UnreadableCall
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _parsed(where: str, name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return strict_json(value)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: {name} cannot be read as JSON ({error})") from error


def _list(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DatasetError(f"{where}: {name} is {type(value).__name__}, expected a list")
    return value
