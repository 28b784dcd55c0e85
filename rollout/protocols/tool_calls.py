"""Parsers of the tool calls in one turn, by format.

hermes   <tool_call>\\n{"name": "search", "arguments": {"query": "..."}}\\n</tool_call>
llama3   {"name": "search", "parameters": {"query": "..."}}, perhaps after <|python_tag|> (Llama 4: <|python_end|>)
harmony  <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "..."}
verl     hermes, as verl's parser reads it
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from rollout.tags import between
from rollout.trajectory import ToolRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = re.compile(r"\s*")
_CLOSING = re.compile(r"\s*(?:</tool_call>|\Z)")  # the tag, or the end of the turn
_LLAMA3_FIRST = re.compile(r'(?:<\|python_tag\|>\s*|(?:^[ \t]*|<\|python_end\|>\s*)(?=\{\s*"name"))', re.MULTILINE)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_LLAMA3_NEXT = re.compile(r"[\s;]*(?=\{)")


class MalformedCall(ValueError):
    """A call that cannot be read; its text says why, for the model to read."""


class UnclosedThinking(ValueError):
    """Thinking that begins and never ends."""


def after_thinking(text: str, opening: str = "<think>", closing: str = "</think>", call: str = OPEN) -> str:
    """Return the text behind the thinking. Thinking begins a turn; a tag anywhere else is text.

    A turn may close what it did not open, where the model leaves the opening tag out; not once a call has begun.

    Args:
        text: one turn, with what the prompt has opened.
        call: the first text of a call.

    Raises:
        UnclosedThinking: the turn begins with thinking that it does not close.

    >>> after_thinking("<think> a </think> b"), after_thinking("a </think> b"), after_thinking("b <think> c")
    (' b', ' b', 'b <think> c')
    """
    end = text.find(closing)
    if end >= 0 and not any(tag and 0 <= text.find(tag, 0, end) for tag in (opening, call)):
        text = text[end + len(closing) :]
    position = 0
    while text.startswith(opening, start := _SPACE.match(text, position).end()):  # type: ignore[union-attr]
        end = text.find(closing, start)
        if end < 0:
            raise UnclosedThinking
        position = end + len(closing)
    return text[position:]


def hermes_calls(text: str) -> tuple[ToolRequest, ...]:
    """Return the calls between tags, in order.

    The last call may lack its closing tag, where the model ended its turn right after the object, and arguments may
    be an object written as text: as the parsers of vLLM and of OpenAI's interface have it.

    Raises MalformedCall for a block without one JSON object {"name": text, "arguments": object}, or a closing tag
    that was never opened.
    """
    calls: list[ToolRequest] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        value, end = decode_json(text, start + len(OPEN))
        closing = _CLOSING.match(text, end)
        if closing is None:
            raise MalformedCall(f"no {CLOSE} after the JSON object")
        calls.append(request(value, ("arguments",)))
        position = closing.end()
    if not calls and CLOSE in text:
        raise MalformedCall(f"{CLOSE} without {OPEN}")
    return tuple(calls)


def verl_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls that verl's parser finds (verl/experimental/agent_loop/tool_parser.py, HermesToolParser): blocks
    between the tags that are JSON with a name and arguments. Other blocks are skipped. Arguments other than an
    object become an empty object, and the tool then answers that it failed.
    """
    calls: list[ToolRequest] = []
    for block in between(text, OPEN, CLOSE):
        try:
            value, end = decode_json(block, 0)
        except MalformedCall:
            continue
        name = value.get("name") if isinstance(value, dict) else None
        if isinstance(name, str) and "arguments" in value and not block[end:].strip():
            arguments = value["arguments"]
            calls.append(ToolRequest(name, arguments if isinstance(arguments, dict) else {}))
    return tuple(calls)


def llama3_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls from ``<|python_tag|>``, or from the first line that begins an object with a "name"; several are parted
    by white space or semicolons. ("arguments" is read as "parameters".)

    Raises MalformedCall for anything but a JSON object {"name": text, "parameters": object}.
    """
    first = _LLAMA3_FIRST.search(text)
    if first is None:
        return ()
    calls: list[ToolRequest] = []
    position: int | None = first.end()
    while position is not None:
        value, end = decode_json(text, position)
        calls.append(request(value, ("parameters", "arguments")))
        following = _LLAMA3_NEXT.match(text, end)
        position = None if following is None else following.end()
    return tuple(calls)


def harmony_messages(text: str) -> tuple[str, tuple[ToolRequest, ...]]:
    """The text of the channel "final", and the calls: messages to a recipient. Other channels are thinking.

    Raises MalformedCall for a call without one JSON object, or a turn that has neither a call nor a final message.
    """
    said: str | None = None
    calls: list[ToolRequest] = []
    for message in text.split("<|end|>"):
        header, found, body = message.partition("<|message|>")
        recipient = _RECIPIENT.search(header)
        if found and recipient:
            arguments, end = decode_json(body, 0)
            if not isinstance(arguments, dict) or body[end:].strip():
                raise MalformedCall("the message to a function must be one JSON object")
            calls.append(ToolRequest(recipient[1], arguments))
        elif found and "<|channel|>final" in header:
            said = (said or "") + body
    if said is None and not calls:
        raise MalformedCall("neither a call nor a message of the channel final")
    return said or "", tuple(calls)


READERS: dict[str, Callable[[str], tuple[ToolRequest, ...]]] = {
    "hermes": hermes_calls,
    "verl": verl_calls,
    "llama3": llama3_calls,
}
FORMS = {  # verl needs none: it finds no call malformed
    "hermes": f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}',
    "llama3": '{"name": "...", "parameters": {...}}',
    "qwen3_coder": f"{OPEN}\n<function=NAME>\n<parameter=KEY>\n...\n</parameter>\n</function>\n{CLOSE}",
    "glm45": f"{OPEN}NAME\n<arg_key>KEY</arg_key>\n<arg_value>...</arg_value>\n{CLOSE}",
    "mistral": "[TOOL_CALLS]NAME[ARGS]{...}",
    "kimi_k2": "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` (white space skipped), and where it ends. Raises MalformedCall."""
    begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty text too
    try:
        value, end = _JSON.raw_decode(text, begin)
        if "\\u" in text[begin:end]:  # half of a surrogate pair could not be saved
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise MalformedCall(f"not valid JSON: {error.msg} at character {error.pos - begin}") from error
    except RecursionError as error:
        raise MalformedCall("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise MalformedCall(f"not valid JSON: {error}") from error
    return value, end


def request(value: Any, keys: tuple[str, ...]) -> ToolRequest:
    """The call of a JSON object with a name and, under the first of the ``keys``, arguments. Raises MalformedCall."""
    if not isinstance(value, dict):
        raise MalformedCall(f"expected a JSON object, found {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise MalformedCall('"name" is missing' if "name" not in value else '"name" is no text')
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise MalformedCall(f'"{keys[0]}" is missing')
    arguments = value[key]
    if isinstance(arguments, str):
        arguments, end = decode_json(arguments, 0)
        if value[key][end:].strip():
            raise MalformedCall(f'"{key}" must be a JSON object, found text')
    if not isinstance(arguments, dict):
        raise MalformedCall(f'"{key}" must be a JSON object, found {_kind(arguments)}')
    return ToolRequest(name.strip(), arguments)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", str: "text", list: "a list", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
