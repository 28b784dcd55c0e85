"""OpenAI's responses: ``POST /responses``.

The items of a turn (reasoning, text, function calls) are read as one message of the assistant.
``previous_response_id`` names an earlier response of the same rollout.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from rollout.programs.requests import NAME, ChatRequest, Reply, RequestError, merge_system, read_request

# Options that a rollout cannot follow, and their values without effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
}
SAME = ("stream", "temperature", "top_p")  # options that chat completions call alike
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
OF_ASSISTANT = ("reasoning", "function_call")

Item = dict[str, Any]


def read(body: Any, kept: dict[str, list[Any]]) -> ChatRequest:
    """Return the request in a JSON body.

    Args:
        kept: the conversations that ended with earlier responses of this rollout, as items, by the response's id.

    Raises:
        RequestError: the body is malformed, or has an option or item that a rollout cannot follow.
    """
    if not isinstance(body, dict):
        return read_request(body)
    for name, harmless in REFUSED.items():
        if body.get(name) not in harmless:
            raise RequestError(f"{name} is not supported; leave it out", "unsupported")
    text, tools, said = body.get("text"), body.get("tools"), body.get("instructions")
    system = [] if said is None else [{"role": "system", "content": said}]
    messages = merge_system([*system, *_messages(_items(body, kept))])
    chat = {name: body.get(name) for name in (*SAME, "tool_choice")}
    chat |= {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    chat["tools"] = [_function(tool) for tool in tools] if isinstance(tools, list) else tools
    chat["response_format"] = text.get("format") if isinstance(text, dict) else None
    return read_request(chat, NAMES)


def answer(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a reply as the JSON body of a response. ``kept`` gets the conversation, except with ``store: false``."""
    cut = reply.finish_reason == "length"
    output = _output(reply)
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": NAME,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        },
    }
    if body.get("store") is not False:
        kept[response["id"]] = [*_items(body, kept), *output]
    return response


def stream(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> str:
    """Return a reply as server-sent events: each item whole, then the response."""
    response = answer(reply, body, kept)
    begun = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events = [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
    for place, item in enumerate(response["output"]):
        events += [event | {"output_index": place} for event in _item_events(item)]
    events.append({"type": f"response.{response['status']}", "response": response})
    numbered = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered)


def _item_events(item: Item) -> Iterator[dict[str, Any]]:
    """Yield the events of one item of the output."""
    of = {"item_id": item["id"]}
    empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {"type": "response.output_item.added", "item": item | empty | {"status": "in_progress"}}
    if item["type"] == "function_call":
        yield of | {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield of | {"type": "response.function_call_arguments.done"} | done
    else:
        part, of = item["content"][0], of | {"content_index": 0}
        kind, text = part["type"], part["text"]
        listed = {"logprobs": []} if kind == "output_text" else {}
        yield of | {"type": "response.content_part.added", "part": part | {"text": ""}}
        yield of | {"type": f"response.{kind}.delta", "delta": text} | listed
        yield of | {"type": f"response.{kind}.done", "text": text} | listed
        yield of | {"type": "response.content_part.done", "part": part}
    yield {"type": "response.output_item.done", "item": item}


def _function(tool: Any) -> Any:
    """Return a function's schema as chat completions write it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: tool.get(k) for k in ("name", "description", "parameters")}}


def _items(body: Item, kept: dict[str, list[Any]]) -> list[Any]:
    """Return the items that a request continues and its own."""
    given, previous = body.get("input"), body.get("previous_response_id")
    if previous is not None and (not isinstance(previous, str) or previous not in kept):
        raise RequestError(f"previous_response_id {str(previous)[:80]!r} is no response of this rollout")
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(own, list):
        kind = "missing" if given is None else type(given).__name__
        raise RequestError(f"input is {kind}; expected a text or a list of items")
    return [*kept.get(previous or "", ()), *own]


def _messages(items: list[Any]) -> list[Item]:
    """Return items as chat messages."""
    messages: list[Item] = []
    open_turn: Item | None = None  # the assistant's message that further items may join
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise RequestError(f"input item {number} is {type(item).__name__}; expected an object")
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            open_turn = None
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            open_turn = None
        elif kind == "message" or kind in OF_ASSISTANT:
            # A second text, or thinking behind a text or a call, begins another turn.
            if open_turn is None or (kind != "function_call" and ("content" in open_turn or "tool_calls" in open_turn)):
                open_turn = {"role": "assistant"}
                messages.append(open_turn)
            if kind == "message":
                open_turn["content"] = item.get("content")
            elif kind == "reasoning":
                open_turn["reasoning_content"] = open_turn.get("reasoning_content", "") + _thinking(item, number)
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                open_turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        else:
            raise RequestError(
                f"input item {number} has the type {str(kind)[:50]!r}; expected message, function_call, "
                "function_call_output or reasoning",
                "unsupported",
            )
    return messages


def _thinking(item: Item, number: int) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"input item {number} (reasoning) has content that is no list of texts")
    return "".join(map(str, texts))


def _output(reply: Reply) -> list[Item]:
    """Return a reply as items: its thinking, its text, its calls."""
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[Item] = []
    if reply.thinking:
        thought = [{"type": "reasoning_text", "text": reply.thinking}]
        items.append({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": thought})
    if reply.content or not reply.calls:
        said = [{"type": "output_text", "text": reply.content or "", "annotations": [], "logprobs": []}]
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": status}
        items.append(head | {"content": said})
    for call in reply.calls:
        ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
        written = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        items.append({"type": "function_call", "status": "completed"} | ids | written)
    return items
