"""The ``vllm serve`` command with which a server reads an exported model's calls as the rollouts did."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.tokenizer import load_tokenizer

TOOL_PARSERS = {"hermes": "hermes", "verl": "hermes", "llama3": "llama3_json"}  # by a protocol's call_format
TEMPLATE = "rollout_template.jinja"


def serve_flags(protocol: Any) -> list[str]:
    """Flags of ``vllm serve`` for the calls and the thinking that a protocol reads.

    ``serve_tool_parser`` and ``serve_reasoning_parser`` of the protocol name vLLM's parsers; without them its
    ``call_format`` does. A protocol whose calls are tags of its own has neither: vLLM's server cannot read them.
    """
    tools = getattr(protocol, "serve_tool_parser", TOOL_PARSERS.get(getattr(protocol, "call_format", "")))
    thinking = getattr(protocol, "serve_reasoning_parser", None)
    options = getattr(getattr(protocol, "chat", None), "options", None)
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", tools] if tools else []
    flags += ["--reasoning-parser", thinking] if thinking else []
    return flags + (["--default-chat-template-kwargs", json.dumps(options)] if options else [])


def template_flags(protocol: Any, folder: Path, called: str) -> list[str]:
    """``--chat-template FILE`` if the exported tokenizer has another chat template than the rollouts used; writes the
    file. vLLM takes the template of the folder's tokenizer otherwise, which is the same.

    Args:
        called: the folder's path in the command.
    """
    tools = getattr(getattr(protocol, "chat", None), "tools", None) or None
    ours, exported = (_template(tokenizer, tools) for tokenizer in (protocol.tokenizer, load_tokenizer(str(folder))))
    if ours is None or ours == exported:
        return []
    (folder / TEMPLATE).write_text(ours, encoding="utf-8")
    return ["--chat-template", f"{called}/{TEMPLATE}"]


def _template(tokenizer: Any, tools: Sequence[Any] | None) -> str | None:
    return tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else None


def serve_command(folder: str, flags: Sequence[str], program: str = "vllm") -> str:
    """A command for a shell.

    >>> serve_command("exports/a", ["--tool-call-parser", "hermes"])
    'vllm serve exports/a --tool-call-parser hermes'
    """
    return shlex.join([program, "serve", folder, *flags])
