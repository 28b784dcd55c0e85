"""Writes the ``vllm serve`` command that reads an exported model's calls as the rollouts did."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.programs.protocol import ProgramProtocol
from rollout.programs.requests import Tools
from rollout.protocols.call_readers import HARMONY, PROBES
from rollout.tokenizer import load_tokenizer

TEMPLATE = "rollout_template.jinja"
NO_TOOLS = "{%- set tools = none -%}"


def serve_flags(protocol: Any) -> list[str]:
    """Return the flags of ``vllm serve`` that select the tool-call parser and the reasoning parser of a protocol.

    The protocol's ``reader`` names vLLM's parsers. A protocol that reads its own tags gets no parser: vLLM's server
    cannot read them.
    """
    protocol = _with_tools(protocol)
    reader, options = getattr(protocol, "reader", None), getattr(getattr(protocol, "chat", None), "options", None)
    flags = []
    if reader is not None and protocol.tools and reader.tool_parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", reader.tool_parser]
    if reader is not None and reader.reasoning_parser and _thinks(protocol):
        flags += ["--reasoning-parser", reader.reasoning_parser]
    return flags + (["--default-chat-template-kwargs", json.dumps(options)] if options else [])


def _with_tools(protocol: Any) -> Any:
    """Return a program's protocol as it is with tools, which otherwise come with each request."""
    return protocol.format_for(Tools(tuple(PROBES), "probes")) if isinstance(protocol, ProgramProtocol) else protocol


def _thinks(protocol: Any) -> bool:
    """Return whether the protocol's chat template makes the model think. A ``<think>`` in the template is not enough:
    the templates of Qwen3's Instruct models use it only to remove thinking from earlier turns."""
    chat, template = protocol.chat, str(protocol.tokenizer.chat_template)
    opening = chat.thinking_tags[0]
    if chat.options.get("enable_thinking") is False:
        return False
    named = "enable_thinking" in template or (opening != "<think>" and opening in template)
    return protocol.reader.name == HARMONY or bool(chat.opened) or named


def template_flags(protocol: Any, folder: Path, called: str) -> list[str]:
    """Return the flag ``--chat-template FILE`` for ``vllm serve``, and write the file, if the rollouts changed the
    exported tokenizer's chat template. Otherwise return no flag: vLLM then uses the template of the exported tokenizer.

    Args:
        called: the folder's path in the command.
    """
    protocol = _with_tools(protocol)
    tools = getattr(getattr(protocol, "chat", None), "tools", None) or None
    ours, exported = (_template(tokenizer, tools) for tokenizer in (protocol.tokenizer, load_tokenizer(str(folder))))
    if ours and getattr(protocol, "tools_in", "") in ("none", "trained") and protocol.tools:
        ours = NO_TOOLS + ours  # that a client's tools are not shown either
    if ours is None or ours == exported:
        return []
    (folder / TEMPLATE).write_text(ours, encoding="utf-8")
    return ["--chat-template", f"{called}/{TEMPLATE}"]


def _template(tokenizer: Any, tools: Sequence[Any] | None) -> str | None:
    return tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else None


def serve_command(folder: str, flags: Sequence[str], program: str = "vllm") -> str:
    """Return the ``vllm serve`` command as one line of text, quoted for a shell."""
    return shlex.join([program, "serve", folder, *flags])
