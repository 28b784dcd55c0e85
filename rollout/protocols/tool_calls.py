"""Parsers of the tool calls in one turn: Hermes tags (Qwen2.5, Qwen3), also as verl reads them, and the JSON
objects of Llama 3.

Hermes:  <tool_call>\\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}\\n</tool_call>
Llama 3: {"name": "code_interpreter", "parameters": {"code": "print(1)"}}, perhaps after <|python_tag|>
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
_VALUE = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)  # a JSON value: tags in its strings alone
_LLAMA3_FIRST = re.compile(r'(?:<\|python_tag\|>\s*|^[ \t]*(?=\{\s*"name"))', re.MULTILINE)
_LLAMA3_NEXT = re.compile(r"[\s;]*(?=\{)")


class MalformedCall(ValueError):
    """A call that cannot be read; its text says why, for the model to read."""


def after_thinking(text: str) -> str | None:
    """Return the text behind the last ``</think>``: all of it without thinking, None if thinking is never closed. Tags
    quoted inside a call (a program that splits at them) are text.

    >>> after_thinking("<think> a </think> b"), after_thinking("b"), after_thinking("<think> a")
    (' b', 'b', None)
    """
    outside = _calls_blanked(text)
    before, closing, _ = outside.rpartition("</think>")
    start = len(before) + len(closing)
    return None if "<think>" in outside[start:] else text[start:]


def hermes_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls between tags, in order; none where there is no tag.

    The last call may lack its closing tag, where the model ended its turn right after the object, and arguments may
    be an object written as text: as the parsers of vLLM and of OpenAI's interface have it.

    Raises MalformedCall for a block without one JSON object {"name": text, "arguments": object}, or a closing tag
    that was never opened.
    """
    calls: list[ToolRequest] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        value, end = _decode(text, start + len(OPEN))
        closing = _CLOSING.match(text, end)
        if closing is None:
            raise MalformedCall(f"no {CLOSE} after the JSON object")
        calls.append(_request(value, ("arguments",)))
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
            value, end = _decode(block, 0)
        except MalformedCall:
            continue
        name = value.get("name") if isinstance(value, dict) else None
        if isinstance(name, str) and "arguments" in value and not block[end:].strip():
            arguments = value["arguments"]
            calls.append(ToolRequest(name, arguments if isinstance(arguments, dict) else {}))
    return tuple(calls)


def llama3_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls from ``<|python_tag|>``, or from the first line that begins an object with a "name"; several are parted
    by white space or semicolons. None where there is neither. ("arguments" is read as "parameters".)

    Raises MalformedCall for what is no JSON object {"name": text, "parameters": object}.
    """
    first = _LLAMA3_FIRST.search(text)
    if first is None:
        return ()
    calls: list[ToolRequest] = []
    position: int | None = first.end()
    while position is not None:
        value, end = _decode(text, position)
        calls.append(_request(value, ("parameters", "arguments")))
        following = _LLAMA3_NEXT.match(text, end)
        position = None if following is None else following.end()
    return tuple(calls)


READERS: dict[str, Callable[[str], tuple[ToolRequest, ...]]] = {
    "hermes": hermes_calls,
    "verl": verl_calls,
    "llama3": llama3_calls,
}
FORMS = {  # verl needs none: it finds no call malformed
    "hermes": f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}',
    "llama3": '{"name": "...", "parameters": {...}}',
}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` (white space skipped), and where it ends."""
    begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches the empty text too
    try:
        value, end = _JSON.raw_decode(text, begin)
        if "\\u" in text[begin:end]:  # half of a surrogate pair is no text, and could not be saved
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise MalformedCall(f"not valid JSON: {error.msg} at character {error.pos - begin}") from error
    except RecursionError as error:
        raise MalformedCall("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise MalformedCall(f"not valid JSON: {error}") from error
    return value, end


def _calls_blanked(text: str) -> str:
    """Replace the calls of a text by spaces: from an opening tag to the end of a call that can be read, else to the
    next closing tag, unless another opening tag comes first (a tag that is merely mentioned).

    Linear: values overlap only where a tag is quoted in a string, and of any two such values one ends at the next tag.
    """
    kept: list[str] = []
    position, closing = 0, text.find(CLOSE)
    while (start := text.find(OPEN, position)) >= 0:
        inside = start + len(OPEN)
        if 0 <= closing < inside:
            closing = text.find(CLOSE, inside)
        value = _VALUE.match(text, inside).end()  # type: ignore[union-attr]  # it matches the empty text too
        end = closing + len(CLOSE) if closing >= 0 and text.find(OPEN, inside, closing) < 0 else None
        if end is None or value != closing:
            end = _end_of_call(text, inside, value) or end
        kept += [text[position:start], OPEN if end is None else " " * (end - start)]
        position = inside if end is None else end
    return "".join([*kept, text[position:]])


def _end_of_call(text: str, start: int, end: int) -> int | None:
    """Return the end of the call whose JSON value may be ``text[start:end]``; None if it cannot be read."""
    closing = _CLOSING.match(text, end)
    if closing is None:
        return None
    try:
        _, read = _decode(text[start:end], 0)
    except MalformedCall:
        return None
    return None if text[start + read : end].strip() else closing.end()


def _request(value: Any, keys: tuple[str, ...]) -> ToolRequest:
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
        arguments, end = _decode(arguments, 0)
        if value[key][end:].strip():
            raise MalformedCall(f'"{key}" must be a JSON object, found text')
    if not isinstance(arguments, dict):
        raise MalformedCall(f'"{key}" must be a JSON object, found {_kind(arguments)}')
    return ToolRequest(name.strip(), arguments)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", str: "text", list: "a list", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
