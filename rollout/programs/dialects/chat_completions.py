"""OpenAI's chat completions: ``POST /chat/completions``."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from rollout.programs.requests import NAME, ChatRequest, Reply, read_request
from rollout.trajectory import ToolRequest


def read(body: Any, kept: dict[str, list[Any]]) -> ChatRequest:
    """Return the request in a JSON body. ``kept`` is not used: each request has its whole conversation. Raises
    RequestError."""
    return read_request(body)


def answer(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a reply as the JSON body of a chat completion."""
    choice = {"index": 0, "message": _message(reply), "finish_reason": reply.finish_reason, "logprobs": None}
    return _head("chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def stream(reply: Reply, body: Any, kept: dict[str, list[Any]]) -> str:
    """Return a reply as server-sent events: the whole turn, then its end."""
    head, message = _head("chat.completion.chunk"), _message(reply)
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index

    def event(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

    events = [event(message, None), event({}, reply.finish_reason)]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append(head | {"choices": [], "usage": _usage(reply)})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def refusal(message: str, status: int, code: str | None) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": NAME}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": _function(call)}
            for call in reply.calls
        ]
    return message


def _function(call: ToolRequest) -> dict[str, str]:
    return {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
