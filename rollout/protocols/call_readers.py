"""Readers of one sampled turn (thinking, tool calls, answer), and the choice of the one that fits a chat template.

A reader fits where it reads back the calls that the template writes. Its parser comes from ``call_formats``, from vLLM
(by the names of its ``--tool-call-parser``) or from you. vLLM's parsers take seconds to import, so they are imported
only where one is needed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout.protocols.call_formats import (
    FORMATS,
    OPEN,
    THINKING,
    Calls,
    MalformedCall,
    Tags,
    after_thinking,
    harmony_turn,
    parameters,
    request,
)
from rollout.protocols.chat_boundaries import ChatBoundaries
from rollout.trajectory import ToolRequest

HERMES, VERL, LLAMA3, HARMONY = "hermes", "verl", "llama3", "harmony"
NATIVE = tuple(FORMATS)
# vLLM's parsers that are not offered. The first four take seconds for a long call (they emit it character by character,
# or their patterns are quadratic). hf and openai need more than a text. The others are second names of our own formats.
LEFT_OUT = {"granite", "plamo3", "inkling", "dots", "hf", "openai", "glm47", "qwen3_xml", "qwen3_json", "llama4_json"}
# Limit on tags in a turn that one of vLLM's parsers reads. A tag takes up to 0.07 ms, and all other trajectories wait.
MOST_TAGS = 1000
# vLLM's ``--reasoning-parser`` of models that think between <think> tags, by tool parser; others are deepseek_r1.
REASONING = {"hermes": "qwen3", "qwen3_coder": "qwen3", "glm45": "glm45", "minimax_m2": "minimax_m2"}


@dataclass
class CallReader:
    """Reads the thinking, the tool calls and the answer of model turns in one format.

    Args:
        name: the name that ``call_format`` has.
        calls: returns the calls of a turn without its thinking; raises MalformedCall.
        form: the form that the model is told to write after a call that cannot be read.
        thinking: the tags of thinking.
        beginning: the first text of a call; thinking cannot end behind it.
        tool_parser: vLLM's name for the format.
        turn: reads a whole turn, for formats whose thinking is not a pair of tags; replaces ``calls``.
    """

    name: str
    calls: Callable[[str], Calls]
    form: str
    thinking: Tags = ("<think>", "</think>")
    beginning: str = OPEN
    tool_parser: str | None = None
    turn: Callable[[str], tuple[str, Calls]] | None = None

    def read(self, turn: str) -> tuple[str, Calls]:
        """Return the text of a model turn without its thinking, and its tool calls.

        Args:
            turn: the text that the prompt has opened and the model has sampled, without the end of the turn.

        Raises:
            MalformedCall: a call that cannot be read.
            UnclosedThinking: thinking that does not end.
        """
        if self.turn is not None:
            return self.turn(turn)
        said = after_thinking(turn, *self.thinking, call=self.beginning)
        return said, self.calls(said)

    @property
    def reasoning_parser(self) -> str | None:
        """Name of vLLM's ``--reasoning-parser`` for this reader's thinking, or None."""
        return reasoning_parser(self.tool_parser, self.thinking)


def reasoning_parser(tool_parser: str | None, thinking: Tags) -> str | None:
    """Return the name of vLLM's ``--reasoning-parser`` for models with this tool parser and these tags of thinking, or
    None."""
    if tool_parser == FORMATS[HARMONY].served_as:
        return "openai_gptoss"
    default = THINKING[thinking]
    return REASONING.get(tool_parser or "", default) if thinking[0] == "<think>" else default


def names() -> tuple[str, ...]:
    """Return the names of all formats of tool calls, in the order that ``auto`` tries them."""
    return (*NATIVE, *(n for n in _vllm().ToolParserManager.list_registered() if n not in (*NATIVE, *LEFT_OUT)))


def call_reader(name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]], thinking: Tags) -> CallReader:
    """Return the reader of one format of tool calls.

    Args:
        name: one of ``names()``, or the dotted path of a function that takes the text behind the thinking, returns
            ToolRequests, and raises MalformedCall.
        schemas: schemas of the tools that may be called; some formats need the types of the arguments.

    Raises:
        ValueError: an unknown name, or one of vLLM's parsers that does not take this tokenizer.
    """
    if name in FORMATS:
        own = FORMATS[name]
        calls = own.calls or no_calls
        calls = partial(calls, schemas=parameters(schemas)) if own.typed else calls
        return CallReader(name, calls, own.form, thinking, own.beginning, own.served_as or name, own.turn)
    if "." in name:
        return CallReader(name, _imported(name), "", thinking, "")
    return CallReader(name, VLLMCalls(name, tokenizer, schemas), "", thinking, "", name)


def reader_without_tools(tokenizer: Any, thinking: Tags) -> CallReader:
    """Return a reader of model turns for rollouts without tools: it separates the thinking from the answer, and finds
    no tool calls."""
    if "<|channel|>" in tokenizer.chat_template and "<|message|>" in tokenizer.chat_template:
        return CallReader(HARMONY, no_calls, "", thinking, "", FORMATS[HARMONY].served_as, harmony_turn)
    return CallReader(HERMES, no_calls, "", thinking, "")


def no_calls(text: str) -> Calls:
    return ()


def _imported(path: str) -> Callable[[str], Calls]:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"call_format {path!r} cannot be imported: {error}; expected MODULE.FUNCTION") from error


class VLLMCalls:
    """Reads the tool calls of a finished turn by one of vLLM's tool parsers.

    A parser returns no calls where it cannot read them. Therefore a call counts as begun where the turn holds
    ``beginning``, the first text of a call that the template writes (``choose_reader`` sets it).
    """

    beginning = ""
    anywhere = True  # else a call begins the turn
    one_each = False  # every call has its own beginning

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> None:
        parsers = _vllm()
        if name in LEFT_OUT or name not in parsers.ToolParserManager.list_registered():
            raise ValueError(
                f"call_format is {name!r}; expected auto or one of {', '.join(names())}, or MODULE.FUNCTION"
            )
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
        # Without this, the parser reads all arguments again at every "<". vLLM 0.32 has no public option for it: the
        # parsers copy their configuration when they are constructed.
        if hasattr(parser, "_parser_engine"):
            parser._parser_engine._stream_arg_deltas = False
        try:
            found = [call.function for call in parser.extract_tool_calls(text, self._request).tool_calls]
        except Exception as error:  # the parser cannot read the call
            raise MalformedCall(f"{type(error).__name__}: {error}") from error
        calls = tuple(request({"name": call.name, "arguments": call.arguments}) for call in found)
        if len(calls) < begun:
            raise MalformedCall(f"{begun} begun, {len(calls)} complete")
        return calls


def _vllm() -> Any:
    """Return vLLM's module of tool parsers, with its logs silenced: the model is told which call cannot be read."""
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


# --- the choice: calls that the template writes are read back ---------------------------------------------------------

_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
PROBES = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probe of the call format.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in (("probe", _TYPES), ("empty_probe", {}))
]
SINGLE, EMPTY, TWO = "text", "no arguments", "two calls"
MANY = 3  # a message names so many formats and counts the others
_ARGUMENTS: dict[str, dict[str, Any]] = {
    SINGLE: {"text": "plain words"},
    "digits": {"text": "12"},
    "number": {"count": 3, "ratio": 2.5},
    "boolean": {"exact": True},
    "object": {"where": {"city": {"names": ["a", 1]}, "exact": False}},
    "list": {"tags": ["a", "b c"]},
    "quotes": {"text": "say \"yes\", 'no' or \\n"},
    "lines": {"text": "for x in y:\n    if a < b and b > c:\n        print(x)\n\nprint(2)"},
    "unicode": {"text": "Zürich 東京 😀"},
    "several": {"text": "a", "count": 1, "exact": False},
}
CASES: dict[str, Calls] = {
    **{name: (ToolRequest("probe", arguments),) for name, arguments in _ARGUMENTS.items()},
    EMPTY: (ToolRequest("empty_probe", {}),),
    TWO: (ToolRequest("probe", {"text": "first"}), ToolRequest("probe", {"text": "second"})),
}
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def choose_reader(chat: ChatBoundaries, call_format: str, schemas: Sequence[dict[str, Any]]) -> tuple[CallReader, bool]:
    """Return the reader of the tool calls that a chat template writes, and whether the template can write two in a
    turn.

    Args:
        chat: its ``arguments_as_text`` is set to the form that is read back.
        call_format: see ``call_reader``, or ``auto``: the first that reads back all calls that the template can write.
        schemas: schemas of the tools that may be called.

    Raises:
        ValueError: the calls are not read back; the message names the formats that were tried.
    """
    tried: list[str] = []
    nearest: tuple[int, str] = (0, "")
    for group in _groups(call_format):
        tried += group
        for as_text in (False, True):
            chat.arguments_as_text = as_text
            turns = written_cases(chat)
            for name in group if turns else ():
                try:
                    reader = _reader(chat, name, PROBES, turns)
                except ValueError:
                    if call_format != "auto":
                        raise
                    continue
                if name == LLAMA3 and not turns[SINGLE].lstrip().startswith(("{", "<|python_")):
                    continue  # tags of another format around the JSON that it finds
                lost = [case for case, turn in turns.items() if not survives(reader, turn, CASES[case])]
                if not lost:
                    return _reader(chat, name, schemas, turns), TWO in turns
                if len(turns) - len(lost) > nearest[0]:
                    nearest = (len(turns) - len(lost), f"; {name} loses {', '.join(lost)}")
    if len(tried) > MANY:
        tried = [*tried[:MANY], f"{len(tried) - MANY} parsers of vLLM's"]
    raise ValueError(
        f"{chat.where} writes tool calls that are not read back; tried {', '.join(tried)}{nearest[1]}. Expected a "
        "call_format that reads what the template writes (auto looks for it), or tools_in: system, which brings its own"
    )


def _groups(call_format: str) -> Iterator[list[str]]:
    """Yield lists of names of call formats to try, one list after the other. vLLM's come last, because importing them
    takes seconds."""
    if call_format != "auto":
        yield [call_format]
    else:
        yield [name for name, own in FORMATS.items() if own.auto]
        yield [name for name in names() if name not in NATIVE]


def _reader(chat: ChatBoundaries, name: str, schemas: Sequence[dict[str, Any]], turns: dict[str, str]) -> CallReader:
    reader = call_reader(name, chat.tokenizer, schemas, chat.thinking_tags)
    if name in FORMATS:
        return reader
    single, empty, two = (
        after_thinking(turns.get(case, ""), *chat.thinking_tags, call="").lstrip() for case in (SINGLE, EMPTY, TWO)
    )
    shared = os.path.commonprefix([single, empty])
    tag = _TAG.match(shared)
    reader.form, reader.beginning = single, tag[0] if tag else shared
    if isinstance(reader.calls, VLLMCalls):
        reader.calls.beginning, reader.calls.anywhere = reader.beginning, bool(tag)
        reader.calls.one_each = bool(tag) and two.count(tag[0]) == len(CASES[TWO])
    return reader


def written_cases(chat: ChatBoundaries) -> dict[str, str]:
    """Render the test calls ``CASES`` with the chat template. Returns the turn's text by case, without the cases that
    the template cannot express."""
    turns: dict[str, str] = {}
    for case, calls in CASES.items():
        try:
            turn = chat.written_call(calls, PROBES)
        except ValueError:
            if case != TWO:
                return {}
            continue
        if case != TWO or all(str(call.arguments["text"]) in turn for call in calls):
            turns[case] = turn
    return turns


def survives(reader: CallReader, turn: str, calls: Calls) -> bool:
    """Return whether the reader recovers exactly the tool calls ``calls`` from a turn, with equal values of equal
    types."""
    try:
        _, found = reader.read(turn)
    except ValueError:
        return False
    return _exact(found) == _exact(calls)


def _exact(calls: Calls) -> str:
    """Return tool calls as JSON text, which tells 1, 1.0 and true apart."""
    return json.dumps([(call.name, call.arguments) for call in calls], sort_keys=True)
