"""Tools, calls and results in ordinary messages, for chat templates that know none of them (SmolLM2, Gemma 3).

The form is Hermes', which `tool_calls.hermes_calls` reads back. A Jinja text in front of the model's own template
writes it, so that a server that gets this template (an export holds it) writes the same prompts.
"""

from __future__ import annotations

import json
from typing import Any

from rollout.protocols.tool_calls import FORMS

SYSTEM = (
    "# Tools\n\nYou can call tools. These are their schemas, one a line:\n<tools>\n",
    "</tools>\n\nTo call a tool, write its name and its arguments as JSON between two tags, and end your turn:\n"
    f"{FORMS['hermes']}\nThe result follows between <tool_response> and </tool_response>.",
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
_FIRST_USER = (  # of the user's, in a template without a system role
    "{%- set plain.messages = [{'role': 'user', 'content': plain.system + '\\n\\n' + plain.messages[0].content}] + "
    "plain.messages[1:] -%}"
)


def with_tool_text(tokenizer: Any) -> str:
    """The tokenizer's chat template with tools in the system message (in the first user's, where it refuses one), calls
    in the assistant's text and results in user messages."""
    place = _OWN_MESSAGE if _takes_system(tokenizer) else _FIRST_USER
    before, after = map(json.dumps, SYSTEM)
    written = _WRITE.replace("SYSTEM_BEFORE", before).replace("SYSTEM_AFTER", after).replace("SYSTEM_PLACE", place)
    return written + tokenizer.chat_template


def _takes_system(tokenizer: Any) -> bool:
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": "the system text"}, {"role": "user", "content": "question"}]
    try:
        return "the system text" in tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return False
