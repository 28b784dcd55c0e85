"""Tools, calls and results in ordinary messages, for chat templates that know none of them (SmolLM2, Gemma 3).

The form is Hermes', which `tool_calls.hermes_calls` reads back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollout.protocols.tool_calls import CLOSE, FORMS, OPEN

Message = dict[str, Any]

RESULT = "<tool_response>\n{text}\n</tool_response>"
SYSTEM = (
    "# Tools\n\nYou can call tools. These are their schemas, one a line:\n<tools>\n{schemas}\n</tools>\n\nTo call a "
    "tool, write its name and its arguments as JSON between two tags, and end your turn:\n{form}\nThe result follows "
    "between <tool_response> and </tool_response>."
)


def system_text(schemas: Sequence[Message]) -> str:
    """What a system message says of the tools and of the form of a call."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return SYSTEM.format(schemas=lines, form=FORMS["hermes"])


def with_tools(messages: Sequence[Message], schemas: Sequence[Message]) -> list[Message]:
    """The messages with the tools at the end of the system message, which is made where there is none."""
    text = system_text(schemas)
    if messages and messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with the system message at the beginning of the first user's, for templates that refuse it."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, first, *rest = messages
    return [first | {"content": f"{system['content']}\n\n{first['content']}"}, *rest]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages without calls and tool messages: calls in the content, results of one turn in one user message."""
    written: list[Message] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] == "tool":
            text = RESULT.format(text=message["content"])
            if before is not None and before["role"] == "tool":
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
            else:
                written.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_call(call.get("function", call)) for call in message["tool_calls"]]
            said = [message["content"]] if message.get("content") else []
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append(kept | {"content": "\n".join([*said, *calls])})
        else:
            written.append(message)
    return written


def _call(function: Message) -> str:
    arguments = function["arguments"]
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n{CLOSE}'
