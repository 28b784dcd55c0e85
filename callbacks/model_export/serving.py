"""The ``vllm serve`` command with which a server reads and writes an exported model's calls as the rollouts did."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.protocols.call_readers import HARMONY
from rollout.protocols.call_text import RESULT, SYSTEM
from rollout.protocols.tool_calls import CLOSE, FORMS, OPEN
from rollout.tokenizer import load_tokenizer

TEMPLATE = "rollout_template.jinja"

# What `call_text` does to the messages, for a template of a server. No line writes anything.
_TOOLS_IN_SYSTEM = """\
{%- set ours = namespace(text="", lines=[], written=[], rest=messages) %}
{%- for tool in tools %}
{%- set ours.lines = ours.lines + [tool | tojson] %}
{%- endfor %}
{%- set ours.text = @before ~ (ours.lines | join("\\n")) ~ @after %}
{%- if messages[0].role == "system" %}
{%- set ours.text = messages[0].content ~ "\\n\\n" ~ ours.text %}
{%- set ours.rest = messages[1:] %}
{%- endif %}
{%- if @takes_system %}
{%- set ours.written = [{"role": "system", "content": ours.text}] %}
{%- endif %}
{%- for message in ours.rest %}
{%- if message.role == "tool" %}
{%- set said = @result ~ message.content ~ @result_end %}
{%- if not loop.first and loop.previtem.role == "tool" %}
{%- set said = ours.written[-1].content ~ "\\n" ~ said %}
{%- set ours.written = ours.written[:-1] + [{"role": "user", "content": said}] %}
{%- else %}
{%- set ours.written = ours.written + [{"role": "user", "content": said}] %}
{%- endif %}
{%- elif message.tool_calls %}
{%- set turn = namespace(parts=[message.content] if message.content else []) %}
{%- for call in message.tool_calls %}
{%- set called = call.function or call %}
{%- set given = called.arguments if called.arguments is string else called.arguments | tojson %}
{%- set call = '{"name": ' ~ (called.name | tojson) ~ ', "arguments": ' ~ given ~ "}" %}
{%- set turn.parts = turn.parts + [@open ~ "\\n" ~ call ~ "\\n" ~ @close] %}
{%- endfor %}
{%- set ours.written = ours.written + [{"role": message.role, "content": turn.parts | join("\\n")}] %}
{%- elif loop.first and not @takes_system %}
{%- set ours.written = [{"role": message.role, "content": ours.text ~ "\\n\\n" ~ message.content}] %}
{%- else %}
{%- set ours.written = ours.written + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = ours.written %}
"""


def serve_flags(protocol: Any) -> list[str]:
    """Flags of ``vllm serve`` for the calls and the thinking that a protocol reads.

    The protocol's ``reader`` names vLLM's parsers. A protocol without one, whose calls are tags of its own, gets no
    parser: vLLM's server cannot read them.
    """
    reader, options = getattr(protocol, "reader", None), getattr(getattr(protocol, "chat", None), "options", None)
    flags = []
    if reader is not None and protocol.tools and reader.tool_parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", reader.tool_parser]
    if reader is not None and reader.reasoning_parser and _thinks(protocol):
        flags += ["--reasoning-parser", reader.reasoning_parser]
    return flags + (["--default-chat-template-kwargs", json.dumps(options)] if options else [])


def _thinks(protocol: Any) -> bool:
    """Whether the template asks for thinking. Its ``<think>`` alone says little: Qwen3's Instruct models, which do not
    think, drop it from earlier turns."""
    chat, template = protocol.chat, str(protocol.tokenizer.chat_template)
    opening = chat.thinking_tags[0]
    if chat.options.get("enable_thinking") is False:
        return False
    named = "enable_thinking" in template or (opening != "<think>" and opening in template)
    return protocol.reader.name == HARMONY or bool(chat.opened) or named


def template_flags(protocol: Any, folder: Path, called: str) -> list[str]:
    """``--chat-template FILE`` if the rollouts did not use the exported tokenizer's chat template as it is; writes the
    file. Without the flag vLLM takes the template of the folder's tokenizer.

    Args:
        called: the folder's path in the command.
    """
    tools = getattr(getattr(protocol, "chat", None), "tools", None) or None
    ours, exported = (_template(tokenizer, tools) for tokenizer in (protocol.tokenizer, load_tokenizer(str(folder))))
    if ours is not None and getattr(protocol, "tools", ()):
        ours = served_template(ours, getattr(protocol, "tools_in", "template"), protocol)
    if ours is None or ours == exported:
        return []
    (folder / TEMPLATE).write_text(ours, encoding="utf-8")
    return ["--chat-template", f"{called}/{TEMPLATE}"]


def served_template(template: str, tools_in: str, protocol: Any) -> str:
    """The chat template that shows a client's tools where the rollouts show theirs."""
    if tools_in == "template" or (tools_in != "system" and "tools" not in template):
        return template
    begin = "{%- if tools %}\n"
    if tools_in == "system":
        before, after = SYSTEM.format(schemas="\0", form=FORMS["hermes"]).split("\0")
        result, result_end = RESULT.format(text="\0").split("\0")
        takes_system = protocol.with_tools([{"role": "user", "content": "question"}])[0]["role"] == "system"
        texts = {"before": before, "after": after, "result_end": result_end, "result": result}
        values = {name: json.dumps(text) for name, text in (texts | {"open": OPEN, "close": CLOSE}).items()}
        adapt = _TOOLS_IN_SYSTEM
        for name, value in (values | {"takes_system": str(takes_system).lower()}).items():
            adapt = adapt.replace(f"@{name}", value)
        begin += adapt
    return f"{begin}{{%- set tools = none %}}\n{{%- endif %}}\n{template}"


def _template(tokenizer: Any, tools: Sequence[Any] | None) -> str | None:
    return tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else None


def serve_command(folder: str, flags: Sequence[str], program: str = "vllm") -> str:
    """A command for a shell.

    >>> serve_command("exports/a", ["--tool-call-parser", "hermes"])
    'vllm serve exports/a --tool-call-parser hermes'
    """
    return shlex.join([program, "serve", folder, *flags])
