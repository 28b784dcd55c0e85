"""Formats of tool calls: one parser each, in linear time, and the table ``FORMATS``.

hermes       <tool_call>\\n{"name": "search", "arguments": {"query": "..."}}\\n</tool_call>
verl         hermes, as verl's parser reads it
llama3       {"name": "search", "parameters": {"query": "..."}}, perhaps after <|python_tag|> (Llama 4: <|python_end|>)
qwen3_coder  <tool_call>\\n<function=search>\\n<parameter=query>\\n...\\n</parameter>\\n</function>\\n</tool_call>
glm45        <tool_call>search\\n<arg_key>query</arg_key>\\n<arg_value>...</arg_value>\\n</tool_call>
mistral      [TOOL_CALLS]search[ARGS]{"query": "..."}, or a JSON list behind [TOOL_CALLS]
kimi_k2      <|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "..."}<|tool_call_end|>
harmony      <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "..."}

vLLM has parsers for the same formats and runs them as if the text were streamed. On a call with 4,000 characters of
code, its qwen3_coder parser takes 1.4 s and its mistral parser 0.6 s, and all other trajectories wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from common.text import whole
from rollout.tags import between
from rollout.tokenizer import render_chat
from rollout.trajectory import ToolRequest

Calls = tuple[ToolRequest, ...]
Schemas = Mapping[str, Mapping[str, Any]]  # by tool: the schemas of its parameters

Tags = tuple[str, str]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, KIMI = "[TOOL_CALLS]", "<|tool_call_begin|>"
KEYS = ("arguments",)

_SPACE = re.compile(r"\s*")
_CLOSING = re.compile(r"\s*(?:</tool_call>|\Z)")  # the tag, or the end of the turn
_LLAMA3_FIRST = re.compile(r'(?:<\|python_tag\|>\s*|(?:^[ \t]*|<\|python_end\|>\s*)(?=\{\s*"name"))', re.MULTILINE)
_LLAMA3_NEXT = re.compile(r"[\s;]*(?=\{)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
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


# Tags of thinking, and vLLM's ``--reasoning-parser`` for them.
THINKING: dict[Tags, str | None] = {
    ("<think>", "</think>"): "deepseek_r1",
    ("[THINK]", "[/THINK]"): "mistral",
    ("<seed:think>", "</seed:think>"): "seed_oss",
    ("<|channel>thought", "<channel|>"): "gemma4",
    ("<|START_THINKING|>", "<|END_THINKING|>"): "cohere_command3",
    ("<|inner_prefix|>", "<|inner_suffix|>"): None,
}


def thinking_tags(template: str, vocabulary: Mapping[str, int]) -> Tags:
    """Return the tags around a model's thinking: those of the chat template, else those of the tokenizer, else
    ``<think>``."""
    found = [tags for tags in THINKING if tags[0] in template] or [tags for tags in THINKING if tags[0] in vocabulary]
    return found[0] if found else ("<think>", "</think>")


class MalformedCall(ValueError):
    """A tool call that cannot be read. The model reads the exception's message."""


class UnclosedThinking(ValueError):
    """A model turn begins with thinking that never ends."""


def after_thinking(text: str, opening: str = "<think>", closing: str = "</think>", call: str = OPEN) -> str:
    """Return the text of a model turn behind its thinking. Thinking begins a turn; a tag anywhere else is text.

    A model may leave out the opening tag. Its closing tag counts then, unless a call has begun before it.

    Args:
        text: one turn, with the text that the prompt has opened.
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
    while text.startswith(opening, start := _skip(text, position)):
        end = text.find(closing, start)
        if end < 0:
            raise UnclosedThinking
        position = end + len(closing)
    return text[position:]


def hermes_calls(text: str) -> Calls:
    """Return the tool calls between ``<tool_call>`` tags, in order. Raises MalformedCall.

    Like the parsers of vLLM and OpenAI, accept a last call without its closing tag, and arguments that are an object
    written as text.
    """

    def read(start: int) -> tuple[ToolRequest, int]:
        value, end = decode_json(text, start)
        after = _match(_CLOSING, text, end, f"no {CLOSE} after the JSON object").end()  # its message comes first
        return request(value), after

    return _each(text, OPEN, read)


def verl_turn(text: str) -> tuple[str, Calls]:
    """Return a turn's text and the tool calls that verl's parser finds in it, also inside thinking
    (verl/experimental/agent_loop/ tool_parser.py, HermesToolParser). Blocks that are not JSON with a name and arguments
    are skipped. Arguments other than an object become an empty object, and the tool answers that it failed."""
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
    return text, tuple(calls)


def llama3_calls(text: str) -> Calls:
    """Return the tool calls of a Llama 3 turn. They begin at ``<|python_tag|>``, or at the first line that begins an
    object with a "name". White space or semicolons separate several calls. Read "arguments" as "parameters". Raises
    MalformedCall."""
    found = _LLAMA3_FIRST.search(text)
    calls: list[ToolRequest] = []
    while found is not None:
        value, end = decode_json(text, found.end())
        calls.append(request(value, ("parameters", "arguments")))
        found = _LLAMA3_NEXT.match(text, end)
    return tuple(calls)


def qwen3_coder_calls(text: str, schemas: Schemas) -> Calls:
    """Return the tool calls in a turn of Qwen3-Coder, Qwen3.5 or Nemotron 3, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _match(_FUNCTION, text, start, f"no <function=NAME> after {OPEN}")
        arguments: dict[str, Any] = {}
        position = head.end()
        while found := _PARAMETER.match(text, position):
            value, position = _until(text, found.end(), "</parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[found[1]] = typed(value, schemas.get(head[1], {}).get(found[1]))
        end = _match(_FUNCTION_END, text, position, f"no </function> and {CLOSE} after the parameters")
        return ToolRequest(head[1], arguments), end.end()

    return _each(text, OPEN, read)


def glm45_calls(text: str, schemas: Schemas) -> Calls:
    """Return the tool calls in a turn of GLM 4.5 to 4.7, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _match(_NAME, text, start, f"no name after {OPEN}")
        name, arguments = head[1].strip(), {}
        position = head.end()
        while found := _KEY.match(text, position):
            value, position = _until(text, found.end(), "</arg_value>")
            key = found[1].strip()
            arguments[key] = typed(value, schemas.get(name, {}).get(key))
        return ToolRequest(name, arguments), _match(_CALL_END, text, position, f"no {CLOSE} after the arguments").end()

    return _each(text, OPEN, read)


def mistral_calls(text: str) -> Calls:
    """Return the tool calls in a turn of Mistral's models, in order. Raises MalformedCall."""
    calls: list[ToolRequest] = []
    position = text.find(MISTRAL)
    while 0 <= position < len(text):
        if not text.startswith(MISTRAL, position):
            raise MalformedCall("text after the JSON of the call")
        start = _skip(text, position + len(MISTRAL))
        if text.startswith("[", start):
            values, position = decode_json(text, start)
            calls += map(request, values)
        else:
            head = _match(_MISTRAL_NAME, text, start, f"no name after {MISTRAL}")
            arguments, position = decode_json(text, head.end())
            calls.append(request({"name": head[1], "arguments": arguments}))
        position = _skip(text, position)
    return tuple(calls)


def kimi_k2_calls(text: str) -> Calls:
    """Return the tool calls in a turn of Kimi K2, in order. Raises MalformedCall."""

    def read(start: int) -> tuple[ToolRequest, int]:
        head = _match(_KIMI_NAME, text, start, "no name and <|tool_call_argument_begin|>")
        arguments, position = decode_json(text, head.end())
        end = _match(_KIMI_END, text, position, "no <|tool_call_end|> after the JSON object")
        return request({"name": head[1], "arguments": arguments}), end.end()

    return _each(text, KIMI, read)


def harmony_turn(text: str) -> tuple[str, Calls]:
    """Return the final text of a harmony turn (gpt-oss; channel "final"), and its tool calls, which are messages to a
    recipient. Other channels are thinking.

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


@dataclass(frozen=True)
class CallFormat:
    """How one format of tool calls is read. Give either ``calls`` or ``turn``."""

    form: str  # shown to the model after a call that cannot be read
    calls: Callable[..., Calls] | None = None  # reads a turn without its thinking
    turn: Callable[[str], tuple[str, Calls]] | None = None  # reads a whole turn: text without thinking, calls
    typed: bool = False  # ``calls`` also takes the schemas of the tools
    beginning: str = OPEN  # the first text of a call
    served_as: str | None = None  # vLLM's ``--tool-call-parser``, where its name differs
    auto: bool = True  # ``call_format: auto`` tries this format


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}', hermes_calls),
    "verl": CallFormat("", turn=verl_turn, served_as="hermes", auto=False),
    "llama3": CallFormat(
        '{"name": "...", "parameters": {...}}', llama3_calls, beginning='{"name"', served_as="llama3_json"
    ),
    "mistral": CallFormat("[TOOL_CALLS]NAME[ARGS]{...}", mistral_calls, beginning=MISTRAL),
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
        kimi_k2_calls,
        beginning=KIMI,
    ),
    "qwen3_coder": CallFormat(
        f"{OPEN}\n<function=NAME>\n<parameter=KEY>\n...\n</parameter>\n</function>\n{CLOSE}",
        qwen3_coder_calls,
        typed=True,
    ),
    "glm45": CallFormat(
        f"{OPEN}NAME\n<arg_key>KEY</arg_key>\n<arg_value>...</arg_value>\n{CLOSE}", glm45_calls, typed=True
    ),
    "harmony": CallFormat(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
        turn=harmony_turn,
        served_as="openai",
    ),
}


def parameters(schemas: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameter schemas of each tool by its name, from OpenAI's function schemas."""
    return {s["function"]["name"]: s["function"].get("parameters", {}).get("properties", {}) for s in schemas}


def typed(value: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the text of an argument, converted to the type that its schema names. A text that does not fit, or a
    schema without a type, leaves the text as it is.

    >>> typed("3", {"type": "integer"}), typed("True", {"type": "boolean"}), typed("3", {"type": "string"})
    (3, True, '3')
    """
    types = _types(schema or {})
    if not types or types == {"string"}:
        return value
    try:
        read = _PYTHON[value] if value in _PYTHON else whole(_JSON.decode(value))
    except (ValueError, RecursionError):
        return value
    return read if types & _JSON_TYPES.get(type(read), set()) else value


def _types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    types = set(declared) if isinstance(declared, list) else {declared} if isinstance(declared, str) else set()
    return types.union(*(_types(part) for key in ("anyOf", "oneOf") for part in schema.get(key) or ()))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, after white space, and its end position. Raises MalformedCall."""
    begin = _skip(text, start)
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


def request(value: Any, keys: tuple[str, ...] = KEYS) -> ToolRequest:
    """Return the tool call that a JSON object describes. The object has a name, and the arguments under one of
    ``keys``, of which the first counts."""
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


def _skip(text: str, position: int) -> int:
    """Return the position in ``text`` behind the white space at ``position``."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text too


def _match(pattern: re.Pattern[str], text: str, position: int, fault: str) -> re.Match[str]:
    found = pattern.match(text, position)
    if found is None:
        raise MalformedCall(fault)
    return found


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Return the text from ``start`` up to ``closing``, and the position behind ``closing`` and white space."""
    end = text.find(closing, start)
    if end < 0:
        raise MalformedCall(f"no {closing} after the value")
    return text[start:end], _skip(text, end + len(closing))


def _each(text: str, opening: str, read: Callable[[int], tuple[ToolRequest, int]]) -> Calls:
    """Return the tool calls of a text, one behind each ``opening`` tag. The function ``read`` takes the position behind
    the tag, and returns the call and the position of its end."""
    calls: list[ToolRequest] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        call, position = read(start + len(opening))
        calls.append(call)
    if not calls and opening == OPEN and CLOSE in text:  # else the turn would count as the last, an answer
        raise MalformedCall(f"{CLOSE} without {OPEN}")
    return tuple(calls)


# Tools, calls and results in ordinary messages, for chat templates that know none of them (SmolLM2, Gemma 3). A Jinja
# text in front of the model's own template writes Hermes' form, which ``hermes_calls`` reads back. An export holds this
# template, so a server writes the same prompts.
SYSTEM = (
    "# Tools\n\nYou can call tools. These are their schemas, one a line:\n<tools>\n",
    "</tools>\n\nTo call a tool, write its name and its arguments as JSON between two tags, and end your turn:\n"
    f"{FORMATS['hermes'].form}\nThe result follows between <tool_response> and </tool_response>.",
)
_WRITE = """\
{%- set plain = namespace(messages=[], system='') -%}
{%- for message in messages -%}
    {%- if loop.first and message.role == 'system' and tools -%}
        {%- set plain.system = message.content + '\\n\\n' -%}
    {%- elif message.role == 'tool' -%}
        {%- set text = '<tool_response>\\n' + message.content + '\\n</tool_response>' -%}
        {%- if not loop.first and loop.previtem.role == 'tool' -%}
            {%- set text = plain.messages[-1].content + '\\n' + text -%}
            {%- set plain.messages = plain.messages[:-1] -%}
        {%- endif -%}
        {%- set plain.messages = plain.messages + [{'role': 'user', 'content': text}] -%}
    {%- elif message.tool_calls -%}
        {%- set said = namespace(text=message.content or '') -%}
        {%- for called in message.tool_calls -%}
            {%- set call = called.function or called -%}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {%- set said.text = said.text + ('\\n' if said.text else '') + '<tool_call>\\n{"name": ' -%}
            {%- set said.text = said.text + (call.name | tojson) + ', "arguments": ' + arguments -%}
            {%- set said.text = said.text + '}\\n</tool_call>' -%}
        {%- endfor -%}
        {%- set plain.messages = plain.messages + [{'role': 'assistant', 'content': said.text}] -%}
    {%- else -%}
        {%- set plain.messages = plain.messages + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {%- set plain.system = plain.system + SYSTEM_BEFORE -%}
    {%- for tool in tools -%}{%- set plain.system = plain.system + (tool | tojson) + '\\n' -%}{%- endfor -%}
    {%- set plain.system = plain.system + SYSTEM_AFTER -%}
    SYSTEM_PLACE
{%- endif -%}
{%- set messages = plain.messages -%}
{%- set tools = none -%}
"""
_OWN_MESSAGE = "{%- set plain.messages = [{'role': 'system', 'content': plain.system}] + plain.messages -%}"
_FIRST_USER = (  # in a template without a system role
    "{%- set plain.messages = [{'role': 'user', 'content': plain.system + '\\n\\n' + plain.messages[0].content}] + "
    "plain.messages[1:] -%}"
)


def with_tool_text(tokenizer: Any) -> str:
    """Return the tokenizer's chat template, changed so that it writes tools into the system message, tool calls into
    the assistant's text and results into user messages. If the template refuses a system message, the tools are in the
    first user message."""
    messages = [{"role": "system", "content": "the system text"}, {"role": "user", "content": "question"}]
    try:
        place = _OWN_MESSAGE if "the system text" in render_chat(tokenizer, messages) else _FIRST_USER
    except ValueError:
        place = _FIRST_USER
    before, after = map(json.dumps, SYSTEM)
    written = _WRITE.replace("SYSTEM_BEFORE", before).replace("SYSTEM_AFTER", after).replace("SYSTEM_PLACE", place)
    return written + tokenizer.chat_template
