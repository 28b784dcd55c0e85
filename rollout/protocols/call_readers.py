"""Readers of one sampled turn: thinking, tool calls and answer, by the name of a call format.

The formats of `tool_calls` are read here. All others are vLLM's tool parsers, by the names of its
``--tool-call-parser``; importing them takes seconds, so they are imported only where one is needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout.protocols.tool_calls import FORMS, OPEN, READERS, MalformedCall, after_thinking, harmony_messages
from rollout.trajectory import ToolRequest

HERMES, VERL, HARMONY = "hermes", "verl", "harmony"
NATIVE = (*READERS, HARMONY)
SERVED_AS = {HERMES: "hermes", VERL: "hermes", "llama3": "llama3_json", HARMONY: "openai"}  # vLLM's names
BEGINNINGS = {"llama3": '{"name"'}  # of a call; hermes and verl: ``OPEN``
# The order in which ``auto`` tries vLLM's parsers. Several read one format: these are the names that vLLM recommends.
# All others follow in vLLM's order.
FIRST = ("qwen3_coder", "glm45", "mistral", "gemma4", "granite", "deepseek_v31", "deepseek_v3", "kimi_k2", "minimax_m2")
Tags = tuple[str, str]
# Thinking, by its tags, and vLLM's ``--reasoning-parser`` for them.
THINKING: dict[Tags, str | None] = {
    ("<think>", "</think>"): "deepseek_r1",
    ("[THINK]", "[/THINK]"): "mistral",
    ("<seed:think>", "</seed:think>"): "seed_oss",
    ("<|channel>thought", "<channel|>"): "gemma4",
    ("<|START_THINKING|>", "<|END_THINKING|>"): "cohere_command3",
    ("<|inner_prefix|>", "<|inner_suffix|>"): None,
}


@dataclass
class CallReader:
    """Reads turns of one format.

    Args:
        name: the format's, as ``call_format`` has it.
        calls: the calls of a turn without its thinking; raises MalformedCall.
        form: what the model is told to write after a call that cannot be read.
        thinking: the tags of thinking.
        beginning: of a call; thinking cannot end behind it.
        tool_parser: vLLM's name for the format.
    """

    name: str
    calls: Any
    form: str
    thinking: Tags = ("<think>", "</think>")
    beginning: str = OPEN
    tool_parser: str | None = None

    def read(self, turn: str) -> tuple[str, tuple[ToolRequest, ...]]:
        """The text of the turn without its thinking, and the calls in it.

        Args:
            turn: what the prompt has opened and the model has sampled, without the end of the turn.

        Raises:
            MalformedCall: a call that cannot be read.
            UnclosedThinking: thinking that does not end.
        """
        if self.name == HARMONY:
            return harmony_messages(turn)
        said = turn if self.name == VERL else after_thinking(turn, *self.thinking, call=self.beginning)
        return said, self.calls(said)

    @property
    def reasoning_parser(self) -> str | None:
        """vLLM's name of the parser for this thinking."""
        if self.name == HARMONY:
            return "openai_gptoss"
        return reasoning_parser(self.tool_parser, self.thinking)


def reasoning_parser(tool_parser: str | None, thinking: Tags) -> str | None:
    """vLLM's ``--reasoning-parser`` of models with this tool parser and these tags of thinking."""
    if thinking[0] != "<think>":
        return THINKING[thinking]
    by_tools = {"hermes": "qwen3", "qwen3_coder": "qwen3", "glm45": "glm45", "minimax_m2": "minimax_m2"}
    return by_tools.get(tool_parser or "", "deepseek_r1")


def thinking_tags(template: str, vocabulary: Mapping[str, int]) -> Tags:
    """The tags of thinking that a chat template writes, else those that the tokenizer has; by default ``<think>``."""
    found = [tags for tags in THINKING if tags[0] in template] or [tags for tags in THINKING if tags[0] in vocabulary]
    return found[0] if found else ("<think>", "</think>")


def names() -> tuple[str, ...]:
    """All formats, in the order in which ``auto`` tries them."""
    others = tuple(_registry())
    first = tuple(name for name in FIRST if name in others)
    return (*NATIVE, *first, *(name for name in others if name not in (*NATIVE, *first)))


def call_reader(name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]], thinking: Tags) -> CallReader:
    """The reader of a format.

    Args:
        name: one of ``names()``.
        schemas: of the tools that may be called; formats without types are read by them.

    Raises:
        ValueError: an unknown name, or a parser of vLLM's that does not take this tokenizer.
    """
    if name in NATIVE:
        reader = READERS.get(name, READERS[HERMES])
        form = FORMS.get(name, FORMS[HERMES])
        return CallReader(name, reader, form, thinking, BEGINNINGS.get(name, OPEN), SERVED_AS[name])
    calls = VLLMCalls(name, tokenizer, schemas)
    return CallReader(name, calls, f"the calls of vLLM's parser {name}", thinking, "", name)


def reader_without_calls(tokenizer: Any, thinking: Tags) -> CallReader:
    """The reader of turns in which nothing can be called."""
    harmony = "<|channel|>" in tokenizer.chat_template and "<|message|>" in tokenizer.chat_template
    return CallReader(HARMONY if harmony else HERMES, lambda text: (), "", thinking, "")


class VLLMCalls:
    """The calls of a finished turn by one of vLLM's tool parsers.

    A parser returns no calls where it cannot read them, as if there were none. Whether a call was begun is therefore
    decided by ``beginning``, the text with which the template begins a call (the round trip sets it).
    """

    beginning = ""
    anywhere = True  # else a call begins the turn
    one_each = False  # every call has its own beginning

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> None:
        registered = _registry()
        if name not in registered:
            raise ValueError(f"call_format is {name!r}; expected auto or one of {', '.join(names())}")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = {"messages": [{"role": "user", "content": "question"}], "tools": [dict(schema) for schema in schemas]}
        self._request = ChatCompletionRequest.model_validate(asked)
        try:
            self._parser = partial(_parser_class(name), tokenizer, self._request.tools)
            self._parser()
        except Exception as error:  # parsers raise what they like: a token that is missing, a package
            raise ValueError(f"vLLM's parser {name} does not take this tokenizer: {error}") from error

    def __call__(self, text: str) -> tuple[ToolRequest, ...]:
        if self.one_each:
            begun = text.count(self.beginning)
        else:
            begun = int(self.beginning in text if self.anywhere else text.lstrip().startswith(self.beginning))
        if not begun:
            return ()
        try:
            found = self._parser().extract_tool_calls(text, self._request).tool_calls
            calls = tuple(ToolRequest(call.function.name, json.loads(call.function.arguments)) for call in found)
        except Exception as error:  # of a parser: the call is what it cannot read
            raise MalformedCall(f"{type(error).__name__}: {error}") from error
        if len(calls) < begun:
            raise MalformedCall(f"{begun} begun, {len(calls)} complete")
        if wrong := [call.name for call in calls if not isinstance(call.arguments, dict)]:
            raise MalformedCall(f"the arguments of {wrong[0]} are no object")
        return calls


def _registry() -> Sequence[str]:
    return tuple(_vllm().ToolParserManager.list_registered())


def _parser_class(name: str) -> Any:
    return _vllm().ToolParserManager.get_tool_parser(name)


def _vllm() -> Any:
    """vLLM's module of tool parsers. Its parsers log every call that they cannot read; the model is told instead."""
    try:
        import vllm.tool_parsers as parsers
    except ImportError as error:
        raise ValueError(
            f"vLLM's tool parsers cannot be imported ({error}); expected the vllm that make setup installs, or a "
            f"call_format of {', '.join(NATIVE)}"
        ) from error
    for name in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return parsers
