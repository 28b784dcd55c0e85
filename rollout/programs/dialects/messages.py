"""Anthropic's messages: ``POST /messages``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from rollout.programs.requests import NAME, ChatRequest, Reply, RequestError, merge_system, read_request

SAME = ("stream", "temperature", "top_p", "top_k", "max_tokens")  # options that chat completions call alike
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
NAMES = {"stop": "stop_sequences", "tool_choice": "tool_choice.type"}
# Claude Code's first system text differs in every request, so that no request would continue another (vLLM 0.32 drops
# it too, entrypoints/anthropic/serving.py).
BILLING = "x-anthropic-billing-header"

Block = dict[str, Any]


def read(body: Any, kept: dict[str, list[Any]]) -> ChatRequest:
    """Return the request in a JSON body. ``kept`` is not used: each request has its whole conversation.

    Raises:
        RequestError: the body is malformed, or has an option or content that a rollout cannot follow.
    """
    if not isinstance(body, dict):
        return read_request(body)
    wanted = body.get("output_config")
    if body.get("output_format") is not None or (isinstance(wanted, dict) and wanted.get("format") is not None):
        raise RequestError("structured output is not supported; leave the format out", "unsupported")
    given, tools, choice = body.get("messages"), body.get("tools"), body.get("tool_choice")
    chat = {name: body.get(name) for name in SAME} | {"messages": given, "stop": body.get("stop_sequences")}
    if isinstance(given, list):
        system = [] if body.get("system") is None else [{"role": "system", "content": _system(body["system"])}]
        chat["messages"] = merge_system([*system, *(m for i, one in enumerate(given, 1) for m in _messages(one, i))])
    chat["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    chat["tool_choice"] = choice.get("type") if isinstance(choice, dict) else choice
    return read_request(chat, NAMES)


def answer(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a reply as the JSON body of a message."""
    content: list[Block] = []
    if reply.thinking:
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.content or not reply.calls:
        content.append({"type": "text", "text": reply.content or ""})
    for call in reply.calls:
        ids = {"id": f"toolu_{uuid.uuid4().hex[:24]}"}
        content.append({"type": "tool_use", "name": call.name, "input": dict(call.arguments)} | ids)
    stopped = reply.finish_reason == "stop" and reply.stop_string is not None
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": content,
        "stop_reason": "stop_sequence" if stopped else STOP_REASONS[reply.finish_reason],
        "stop_sequence": reply.stop_string if stopped else None,
        "usage": {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.sampled_tokens,
        },
    }


def stream(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> str:
    """Return a reply as server-sent events: each block whole, then the end of the message."""
    message = answer(reply, body, kept)
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    begun = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    events = [{"type": "message_start", "message": begun | {"usage": message["usage"] | {"output_tokens": 0}}}]
    for place, block in enumerate(message["content"]):
        events += [event | {"index": place} for event in _block_events(block)]
    events += [{"type": "message_delta", "delta": end, "usage": message["usage"]}, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def refusal(message: str, status: int, code: str | None) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = {400: "invalid_request_error", 413: "request_too_large"}.get(status)
    kind = kind or ("not_found_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def _block_events(block: Block) -> Iterator[dict[str, Any]]:
    """Yield the events of one content block."""
    if block["type"] == "tool_use":
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    else:
        empty = {block["type"]: ""}
        delta = {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}
    yield {"type": "content_block_start", "content_block": block | empty}
    yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def _system(given: Any) -> Any:
    """Return the content of a system message without the text that differs in every request."""
    if not isinstance(given, list):
        return given
    return [b for b in given if not (isinstance(b, dict) and str(b.get("text", "")).startswith(BILLING))]


def _messages(message: Any, number: int) -> list[dict[str, Any]]:
    """Return a message as chat messages, with a separate message for each tool result."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    role, thought = message.get("role"), ""
    if role == "system":
        return [{"role": role, "content": _system(content)}]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            found = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            results.append({"role": "tool"} | found)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "thinking" and role == "assistant":
            thought += str(block.get("thinking", ""))
        elif kind == "text":
            texts.append(block)
        elif kind != "redacted_thinking":
            raise RequestError(f"message {number} ({role}) has a block of type {kind!r}", "unsupported")
    said = {"role": role, "content": texts, "tool_calls": calls, "reasoning_content": thought}
    return [*results, said] if texts or role == "assistant" or not results else results


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f"tools has one of type {str(kind)[:50]!r}; expected tools with a schema", "unsupported")
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool.get("name")} | described | {"parameters": tool.get("input_schema")}
