"""Requests and replies of agent programs, and the reader of requests in the form of OpenAI's chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollout.tools.schemas import read_schemas
from rollout.trajectory import ToolRequest

NAME = "policy"  # of the model, in answers
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Options that would change what is sampled in ways that a rollout cannot follow, and their values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "echo": (None, False),
}
# Options that the rollout's own sampling replaces.
IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_WHOLE = re.compile(r"(?<=[:\[,])(-?\d+)\.0(?=[,\]}])")  # in JSON without blanks
THINKING = ("reasoning_content", "reasoning")  # names of the thinking, in the order of preference


class RequestError(ValueError):
    """A request that cannot be answered.

    Args:
        code: OpenAI's error code, or None.
        status: of HTTP.
    """

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message in the form that is compared: without ids, nulls and thinking, its content as one text."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments as canonical JSON
    place: int = field(default=0, compare=False)  # of a tool's result: the position of its call in the turn

    @property
    def compared(self) -> tuple[str, ...]:
        """Texts that are equal if the messages are, where 1.0 is 1: clients in JavaScript send integers back so."""
        return (self.role, self.content, *(_WHOLE.sub(r"\1", part) for call in self.calls for part in call))

    @property
    def requests(self) -> tuple[ToolRequest, ...]:
        return tuple(ToolRequest(name, json.loads(arguments)) for name, arguments in self.calls)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    schemas: tuple[dict[str, Any], ...] = ()  # as the program wrote them, without nulls
    key: str = "[]"  # equal for equal tools, whatever the order of their keys


NO_TOOLS = Tools()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one turn of the model."""

    messages: tuple[ChatMessage, ...]
    thinking: tuple[str | None, ...]  # of each message, where the program sends it back
    tools: Tools = NO_TOOLS
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    ignored: tuple[str, ...] = ()  # options that the rollout's sampling replaces


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's turn, as the program reads it."""

    content: str | None
    thinking: str | None
    calls: tuple[ToolRequest, ...]
    finish_reason: str  # stop, length or tool_calls
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    stop_string: str | None = None  # of the request, that ended the turn

    @property
    def message(self) -> ChatMessage:
        calls = tuple((call.name, arguments_text(call.arguments)) for call in self.calls)
        return ChatMessage("assistant", self.content or "", calls)


def read_request(body: Any, names: Mapping[str, str] | None = None) -> ChatRequest:
    """Return a request from the JSON body of ``POST /chat/completions``. Unknown options are ignored, as servers do.

    Args:
        names: names of options as the client wrote them, for messages, by the names here.

    Raises:
        RequestError: the body is malformed, or has an option that a rollout cannot follow.
    """
    try:
        return _read(body)
    except RecursionError:
        raise RequestError("the request is nested too deeply") from None
    except RequestError as error:
        option, found, rest = str(error).partition(" is ")
        if found and option in (names or {}):
            raise RequestError(f"{(names or {})[option]} is {rest}", error.code, error.status) from None
        raise


def merge_system(messages: Sequence[Any]) -> list[Any]:
    """Return chat messages with those of the system at the beginning joined to one, because many chat templates take
    one only."""
    merged: list[Any] = []
    for message in messages:
        of_system = isinstance(message, dict) and message.get("role") in ("system", "developer")
        if of_system and len(merged) == 1 and merged[0].get("role") == "system":
            texts = [_text(one.get("content"), "a system message") for one in (merged[0], message)]
            merged = [{"role": "system", "content": "\n\n".join(text for text in texts if text)}]
        else:
            merged.append(message | {"role": "system"} if of_system else message)
    return merged


def _read(body: Any) -> ChatRequest:
    if not isinstance(body, dict):
        raise RequestError(f"the body is {_kind(body)}; expected a JSON object")
    for name, harmless in REFUSED.items():
        if (value := body.get(name)) not in harmless:
            raise RequestError(
                f"{name} is {json.dumps(value)[:100]}; a rollout takes {_shown(harmless)}", "unsupported"
            )
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages is {_kind(given)}; expected a list with at least one message")
    messages, thinking = _messages(given)
    return ChatRequest(
        messages,
        thinking,
        tools=NO_TOOLS if body.get("tool_choice") == "none" else _tools(body.get("tools")),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
    )


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as canonical JSON. Nulls stay: they are the model's words."""
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _messages(given: Sequence[Any]) -> tuple[tuple[ChatMessage, ...], tuple[str | None, ...]]:
    messages: list[ChatMessage] = []
    thinking: list[str | None] = []
    waiting: dict[str, int] = {}  # ids of the calls that are not answered, by position
    results: list[tuple[int, ChatMessage]] = []
    for number, message in enumerate([*given, None], 1):
        role = message.get("role") if isinstance(message, dict) else None
        if role != "tool" and results:  # in the order of the calls
            messages += [result for _, result in sorted(results, key=lambda pair: pair[0])]
            thinking += [None] * len(results)
            results, waiting = [], {}
        if message is None:
            if number <= len(given):
                raise RequestError(f"message {number} is null; expected an object with a role")
            break
        if not isinstance(role, str) or role not in ROLES:
            known = ", ".join(ROLES)
            raise RequestError(f"message {number} has the role {json.dumps(role)[:50]}; expected one of {known}")
        where = f"message {number} ({role})"
        content = _text(message.get("content"), where)
        if role == "tool":
            place = waiting.get(str(message.get("tool_call_id")), len(results))
            results.append((place, ChatMessage("tool", content, place=place)))
            continue
        calls = _calls(message.get("tool_calls"), where) if role == "assistant" else []
        waiting = {identity: place for place, (identity, _, _) in enumerate(calls)}
        messages.append(ChatMessage(ROLES[role], content, tuple((name, text) for _, name, text in calls)))
        thought = next((text for key in THINKING if isinstance(text := message.get(key), str) and text), None)
        thinking.append(thought if role == "assistant" else None)
    return tuple(messages), tuple(thinking)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            shown = kind if isinstance(kind, str) else _kind(part)
            raise RequestError(f"the content of {where} has a part of type {shown}; expected text", "unsupported")
        texts.append(text)
    return "".join(texts)


def _calls(given: Any, where: str) -> list[tuple[str, str, str]]:
    """Return (id, name, arguments as canonical JSON) of each tool call of a message."""
    if not isinstance(given, list | None):
        raise RequestError(f"tool_calls of {where} is {_kind(given)}; expected a list")
    calls = []
    for call in given or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"a tool call of {where} has no function with a name")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(f"the arguments of {function['name']} in {where} are no JSON object")
        calls.append((str(call.get("id")), function["name"], arguments_text(arguments)))
    return calls


def _tools(given: Any) -> Tools:
    return NO_TOOLS if given is None else _read_tools(json.dumps(given))


@lru_cache(maxsize=256)
def _read_tools(text: str) -> Tools:
    given = json.loads(text)
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise RequestError(f"tools is {_kind(given)}; expected a list of function schemas")
    if other := next((tool.get("type") for tool in given if tool.get("type", "function") != "function"), None):
        raise RequestError(f"tools has one of type {other!r}; expected functions", "unsupported")
    functions = [without_nulls(tool.get("function", tool)) for tool in given]
    if other := next((f for f in functions if not isinstance(f, dict)), None):
        raise RequestError(f"tools has a function that is {_kind(other)}; expected an object with name and parameters")
    empty = {"type": "object", "properties": {}}  # a tool without parameters may leave them out
    try:
        # The order of keys stays the program's, as a server would show it to the model.
        schemas = read_schemas([f if "parameters" in f else f | {"parameters": empty} for f in functions])
    except ValueError as error:
        raise RequestError(str(error)) from error
    return Tools(schemas, json.dumps(schemas, sort_keys=True))


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    both = (body.get("max_completion_tokens"), body.get("max_tokens"))
    given = next((value for value in both if value is not None), None)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise RequestError(f"max_tokens is {json.dumps(given)[:50]}; expected a positive integer")
    return given


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop is {json.dumps(given)[:100]}; expected a text or a list of texts")
    return tuple(texts)


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def _shown(values: Sequence[Any]) -> str:
    return " or ".join("nothing" if value is None else json.dumps(value) for value in values)
