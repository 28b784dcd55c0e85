"""Readers of one sampled turn: thinking, tool calls and answer, by the name of a call format.

The formats of `tool_calls` and `tagged_calls` are read here. All others are vLLM's tool parsers, by the names of its
``--tool-call-parser``. Importing them takes seconds, so they are imported only where one is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout.protocols.tagged_calls import (
    KIMI,
    MISTRAL,
    glm45_calls,
    kimi_k2_calls,
    mistral_calls,
    parameters,
    qwen3_coder_calls,
)
from rollout.protocols.tool_calls import FORMS, OPEN, READERS, MalformedCall, after_thinking, harmony_messages, request
from rollout.trajectory import ToolRequest

Calls = tuple[ToolRequest, ...]

HERMES, VERL, LLAMA3, HARMONY = "hermes", "verl", "llama3", "harmony"
PLAIN: dict[str, Callable[[str], Calls]] = {**READERS, "mistral": mistral_calls, "kimi_k2": kimi_k2_calls}
TYPED = {"qwen3_coder": qwen3_coder_calls, "glm45": glm45_calls}  # read by the schemas of the tools
NATIVE = (*PLAIN, *TYPED, HARMONY)
BEGINNINGS = {LLAMA3: '{"name"', "mistral": MISTRAL, "kimi_k2": KIMI}  # of a call; all others: ``OPEN``
SERVED_AS = {VERL: HERMES, LLAMA3: "llama3_json", HARMONY: "openai"}  # vLLM's names, where they are others
# Of vLLM's parsers. The first four take seconds for a long call (they emit it character by character, or their patterns
# are quadratic); hf and openai need more than a text; the others are second names of formats that are read here.
LEFT_OUT = {"granite", "plamo3", "inkling", "dots", "hf", "openai", "glm47", "qwen3_xml", "qwen3_json", "llama4_json"}
# Tags in a turn that one of vLLM's parsers reads. A tag takes up to 0.07 ms, in which all other trajectories wait.
MOST_TAGS = 1000
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
    calls: Callable[[str], Calls]
    form: str
    thinking: Tags = ("<think>", "</think>")
    beginning: str = OPEN
    tool_parser: str | None = None

    def read(self, turn: str) -> tuple[str, Calls]:
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
    return by_tools.get(tool_parser or "", THINKING[thinking])


def thinking_tags(template: str, vocabulary: Mapping[str, int]) -> Tags:
    """The tags of thinking that a chat template writes, else those that the tokenizer has; by default ``<think>``."""
    found = [tags for tags in THINKING if tags[0] in template] or [tags for tags in THINKING if tags[0] in vocabulary]
    return found[0] if found else ("<think>", "</think>")


def names() -> tuple[str, ...]:
    """All formats, in the order of ``auto``."""
    return (*NATIVE, *(n for n in _vllm().ToolParserManager.list_registered() if n not in (*NATIVE, *LEFT_OUT)))


def call_reader(name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]], thinking: Tags) -> CallReader:
    """The reader of a format.

    Args:
        name: one of ``names()``.
        schemas: of the tools that may be called; formats without types are read by them.

    Raises:
        ValueError: an unknown name, or a parser of vLLM's that does not take this tokenizer.
    """
    if name in NATIVE:
        calls = partial(TYPED[name], schemas=parameters(schemas)) if name in TYPED else PLAIN.get(name, _none)
        form, beginning = FORMS.get(name, FORMS[HERMES]), BEGINNINGS.get(name, OPEN)
        return CallReader(name, calls, form, thinking, beginning, SERVED_AS.get(name, name))
    calls = VLLMCalls(name, tokenizer, schemas)
    return CallReader(name, calls, f"the calls of vLLM's parser {name}", thinking, "", name)


def reader_without_calls(tokenizer: Any, thinking: Tags) -> CallReader:
    """The reader of turns without tools."""
    harmony = "<|channel|>" in tokenizer.chat_template and "<|message|>" in tokenizer.chat_template
    return CallReader(HARMONY if harmony else HERMES, _none, "", thinking, "")


def _none(text: str) -> Calls:
    return ()


class VLLMCalls:
    """The calls of a finished turn by one of vLLM's tool parsers.

    A parser returns no calls where it cannot read them. Therefore a call counts as begun where the turn holds
    ``beginning``, the first text of a call that the template writes (the round trip sets it).
    """

    beginning = ""
    anywhere = True  # else a call begins the turn
    one_each = False  # every call has its own beginning

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> None:
        parsers = _vllm()
        if name in LEFT_OUT or name not in parsers.ToolParserManager.list_registered():
            raise ValueError(f"call_format is {name!r}; expected auto or one of {', '.join(names())}")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = {"messages": [{"role": "user", "content": "question"}], "tools": [dict(schema) for schema in schemas]}
        self._request = ChatCompletionRequest.model_validate(asked)
        try:
            self._parser = partial(parsers.ToolParserManager.get_tool_parser(name), tokenizer, self._request.tools)
            self._parser()
        except Exception as error:  # parsers raise what they like: a token that is missing, a package
            raise ValueError(f"vLLM's parser {name} does not take this tokenizer: {error}") from error

    def __call__(self, text: str) -> Calls:
        if self.one_each:
            begun = text.count(self.beginning)
        else:
            begun = int(self.beginning in text if self.anywhere else text.lstrip().startswith(self.beginning))
        if not begun:
            return ()
        if text.count("<") > MOST_TAGS or text.count(self.beginning) > MOST_TAGS:
            raise MalformedCall(f"more than {MOST_TAGS} tags in one turn")
        parser = self._parser()
        if hasattr(parser, "_parser_engine"):  # else it reads all arguments again at every "<"
            parser._parser_engine._stream_arg_deltas = False
        try:
            found = [call.function for call in parser.extract_tool_calls(text, self._request).tool_calls]
        except Exception as error:  # of a parser: the call is what it cannot read
            raise MalformedCall(f"{type(error).__name__}: {error}") from error
        calls = tuple(request({"name": call.name, "arguments": call.arguments}, ("arguments",)) for call in found)
        if len(calls) < begun:
            raise MalformedCall(f"{begun} begun, {len(calls)} complete")
        return calls


def _vllm() -> Any:
    """vLLM's module of tool parsers. Its parsers log every call that they cannot read; the model is told instead."""
    environment = dict(os.environ)  # the import sets variables for vLLM's own processes
    try:
        import vllm.tool_parsers as parsers
    except ImportError as error:
        raise ValueError(
            f"vLLM's tool parsers cannot be imported ({error}); expected the vllm that make setup installs, or a "
            f"call_format of {', '.join(NATIVE)}"
        ) from error
    finally:
        os.environ.update(environment)
        for variable in set(os.environ) - set(environment):
            del os.environ[variable]
    for name in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return parsers
