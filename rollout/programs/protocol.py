"""The chat format of a program's requests: prompts with the request's own tools, and the turns read back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

from rollout.programs.requests import NO_TOOLS, ChatMessage, RequestError, Tools
from rollout.protocols.base import PromptMode
from rollout.protocols.hermes import HermesProtocol
from rollout.protocols.text_protocol import TextProtocol
from rollout.samplers.base import check_forks
from rollout.trajectory import Action, Task, ToolResult

FORMATS = 16  # lists of tools whose formats are kept; each has a tokenizer


class ProgramProtocol(TextProtocol):
    """Writes the requests of a program in the model's chat format, and reads the model's turns. Each request brings its
    own messages and tools.

    Args:
        tokenizer: Hugging Face folder with a chat template.
        tools_in: place of the tools in the prompt: ``template``, ``system`` or ``auto``, see ``HermesProtocol``.
        thinking: passed to the template as ``enable_thinking``; by default the template decides.
        call_format: reader of the calls, see ``HermesProtocol``.
        history: earlier turns as the model reads them. ``sampled``: its own tokens, thinking included, wherever the
            program sends back what the model wrote. ``template``: every request is rendered as a whole; the template
            decides what it keeps of earlier turns.

    Raises:
        ValueError: see ``HermesProtocol``.
    """

    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()  # each request has its own
    per_turn_prompts = False

    def __init__(
        self,
        tokenizer: str,
        tools_in: Literal["auto", "template", "system"] = "auto",
        thinking: bool | None = None,
        call_format: str = "auto",
        history: Literal["sampled", "template"] = "sampled",
    ) -> None:
        super().__init__(tokenizer, eos_ends=False)
        self.folder, self.thinking, self.call_format = tokenizer, thinking, call_format
        self.tools_in: Literal["auto", "template", "system"] = tools_in
        self.history = history
        self._formats: dict[str, HermesProtocol] = {}
        self._lock = threading.Lock()
        self.format_for(NO_TOOLS)

    def format_for(self, tools: Tools) -> HermesProtocol:
        """Return the chat format for a list of tool schemas. A new list takes tenths of a second; the latest are kept.

        Raises:
            RequestError: the model's template cannot write these tools or their calls.
        """
        with self._lock:
            if (known := self.known_format(tools)) is not None:
                return known
            try:
                made = HermesProtocol(
                    self.folder,
                    tools.schemas,
                    self.tools_in,
                    thinking=self.thinking,
                    max_parallel_calls=None,
                    call_format=self.call_format,
                )
            except ValueError as error:
                if not tools.schemas:
                    raise
                raise RequestError(f"these tools cannot be shown to the model: {error}", "unsupported") from error
            self._formats[tools.key] = made
            if len(self._formats) > FORMATS:
                self._formats.pop(next(iter(self._formats)))
            return made

    def known_format(self, tools: Tools) -> HermesProtocol | None:
        """Return the chat format for a list of tools if it is kept, and keep it for longer; else None."""
        known = self._formats.pop(tools.key, None)
        if known is not None:
            self._formats[tools.key] = known
        return known

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """Raises ValueError: what the model reads of a task is known only once the program asks."""
        raise ValueError(
            f"task {task.id}: the program writes the prompts, so there is none before it runs; this option or method "
            "needs a protocol that writes them"
        )

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        return self.format_for(NO_TOOLS).parse(text)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Raises ValueError: observations are messages of the program."""
        raise ValueError("a program writes its observations itself")


def check_program(protocol: type, environment: object, sampler: object) -> None:
    """Raise ValueError if a program plays beside an environment, with another protocol, or with a sampler that forks.

    Args:
        environment: None without one.
        sampler: a sampler or its class.
    """
    if environment is not None:
        raise ValueError("rollouts has an environment and a program; give one of them")
    if not issubclass(protocol, ProgramProtocol):
        raise ValueError(f"a program needs a ProgramProtocol as rollouts.protocol; found {protocol.__name__}")
    check_forks(sampler, "a program")


def prompt_of(form: HermesProtocol, messages: Sequence[ChatMessage], thinking: Sequence[str | None]) -> list[int]:
    """Return the token ids of a conversation that is rendered as a whole, with the header of the next turn. Control
    tokens in texts are quoted. Raises RequestError where the template refuses the messages."""
    chat = form.chat
    rendered = []
    for message, thought in zip(messages, thinking, strict=True):
        written: dict[str, Any] = {"role": message.role}
        if message.calls:
            written = chat.message(message.requests, chat.quotes.quote)
        if thought:
            written["reasoning_content"] = chat.quotes.quote_special(thought)
        rendered.append(written | {"content": message.content})
    try:
        return chat.prompt_ids(rendered)
    except ValueError as error:
        raise RequestError(str(error)) from error


def tail_ids(form: HermesProtocol, tail: Sequence[ChatMessage], called: Sequence[str], ended: bool) -> list[int]:
    """Return the token ids between a sampled turn and the next: the messages of ``tail`` and the header.

    Raises:
        ValueError: the template refuses them.
    """
    messages = [{"role": message.role, "content": message.content} for message in tail]
    return form.chat.ids_after(messages, called=called, ended=ended)
