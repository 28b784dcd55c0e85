"""Parsers of tool calls whose arguments stand between tags or behind a name, in linear time.

qwen3_coder  <tool_call>\\n<function=search>\\n<parameter=query>\\n...\\n</parameter>\\n</function>\\n</tool_call>
glm45        <tool_call>search\\n<arg_key>query</arg_key>\\n<arg_value>...</arg_value>\\n</tool_call>
mistral      [TOOL_CALLS]search[ARGS]{"query": "..."}, or a JSON list behind [TOOL_CALLS]
kimi_k2      <|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "..."}<|tool_call_end|>

vLLM has parsers for these too, which it runs as if the text were streamed. A call of 4,000 characters of code takes its
qwen3_coder 1.4 s and its mistral 0.6 s, and all other trajectories wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.protocols.tool_calls import CLOSE, OPEN, MalformedCall, decode_json, request
from rollout.trajectory import ToolRequest

Schemas = Mapping[str, Mapping[str, Any]]  # by tool: the schemas of its parameters

MISTRAL, KIMI = "[TOOL_CALLS]", "<|tool_call_begin|>"

_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"</function>\s*(?:</tool_call>|\Z)")
_NAME = re.compile(r"\s*([^<>\n]+)\s*")
_KEY = re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_CALL_END = re.compile(r"</tool_call>|\Z")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([^\s:<>]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>")
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")
_PYTHON = {"True": True, "False": False, "None": None}  # as Jinja prints them
_JSON_TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}


def parameters(schemas: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of the parameters, by tool, of OpenAI's function schemas."""
    return {s["function"]["name"]: s["function"].get("parameters", {}).get("properties", {}) for s in schemas}


def qwen3_coder_calls(text: str, schemas: Schemas) -> tuple[ToolRequest, ...]:
    """The calls of Qwen3-Coder, Qwen3.5 and Nemotron 3, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _FUNCTION.match(text, start)
        if head is None:
            raise MalformedCall(f"no <function=NAME> after {OPEN}")
        arguments: dict[str, Any] = {}
        position = head.end()
        while found := _PARAMETER.match(text, position):
            value, position = _until(text, found.end(), "</parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[found[1]] = typed(value, schemas.get(head[1], {}).get(found[1]))
        end = _FUNCTION_END.match(text, position)
        if end is None:
            raise MalformedCall(f"no </function> and {CLOSE} after the parameters")
        return ToolRequest(head[1], arguments), end.end()

    return _each(text, OPEN, read)


def glm45_calls(text: str, schemas: Schemas) -> tuple[ToolRequest, ...]:
    """The calls of GLM 4.5 to 4.7, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _NAME.match(text, start)
        if head is None:
            raise MalformedCall(f"no name after {OPEN}")
        name, arguments = head[1].strip(), {}
        position = head.end()
        while found := _KEY.match(text, position):
            value, position = _until(text, found.end(), "</arg_value>")
            key = found[1].strip()
            arguments[key] = typed(value, schemas.get(name, {}).get(key))
        end = _CALL_END.match(text, position)
        if end is None:
            raise MalformedCall(f"no {CLOSE} after the arguments")
        return ToolRequest(name, arguments), end.end()

    return _each(text, OPEN, read)


def mistral_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls of Mistral's models, in order. Raises MalformedCall."""
    calls: list[ToolRequest] = []
    position = text.find(MISTRAL)
    while position >= 0:
        start = _SPACE.match(text, position + len(MISTRAL)).end()  # type: ignore[union-attr]  # it matches "" too
        if text.startswith("[", start):
            values, position = decode_json(text, start)
            calls += [request(value, ("arguments",)) for value in values]
        else:
            head = _MISTRAL_NAME.match(text, start)
            if head is None:
                raise MalformedCall(f"no name after {MISTRAL}")
            arguments, position = decode_json(text, head.end())
            calls.append(request({"name": head[1], "arguments": arguments}, ("arguments",)))
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position == len(text):
            break
        if not text.startswith(MISTRAL, position):
            raise MalformedCall("text after the JSON of the call")
    return tuple(calls)


def kimi_k2_calls(text: str) -> tuple[ToolRequest, ...]:
    """The calls of Kimi K2, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _KIMI_NAME.match(text, start)
        if head is None:
            raise MalformedCall("no name and <|tool_call_argument_begin|>")
        arguments, position = decode_json(text, head.end())
        end = _KIMI_END.match(text, position)
        if end is None:
            raise MalformedCall("no <|tool_call_end|> after the JSON object")
        return request({"name": head[1], "arguments": arguments}, ("arguments",)), end.end()

    return _each(text, KIMI, read)


def typed(value: str, schema: Mapping[str, Any] | None) -> Any:
    """Convert the text of an argument to the type that its schema names. A text that does not fit, or a schema without
    a type, leaves the text as it is.

    >>> typed("3", {"type": "integer"}), typed("True", {"type": "boolean"}), typed("3", {"type": "string"})
    (3, True, '3')
    """
    types = _types(schema or {})
    if not types or types == {"string"}:
        return value
    try:
        read = _PYTHON[value] if value in _PYTHON else json.loads(value)
    except (ValueError, RecursionError):
        return value
    return read if types & _JSON_TYPES.get(type(read), set()) else value


def _types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    types = set(declared) if isinstance(declared, list) else {declared} if isinstance(declared, str) else set()
    return types.union(*(_types(part) for key in ("anyOf", "oneOf") for part in schema.get(key) or ()))


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """The text up to ``closing``, and where what follows it begins, white space skipped."""
    end = text.find(closing, start)
    if end < 0:
        raise MalformedCall(f"no {closing} after the value")
    return text[start:end], _SPACE.match(text, end + len(closing)).end()  # type: ignore[union-attr]


def _each(text: str, opening: str, read: Any) -> tuple[ToolRequest, ...]:
    calls: list[ToolRequest] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        call, position = read(start + len(opening))
        calls.append(call)
    if not calls and opening == OPEN and CLOSE in text:  # else the turn would be an answer, and the last
        raise MalformedCall(f"{CLOSE} without {OPEN}")
    return tuple(calls)
