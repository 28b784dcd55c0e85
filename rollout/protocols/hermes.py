"""Tool calling in a model's own chat format (Hermes, Llama 3): template, call syntax, exact tokens between turns.

Source: the Hermes format of Qwen2.5 and Qwen3 (docs/papers/sod.md 4.2), and the JSON calls of Llama 3. Mended here: the
line break after an end of turn is kept (verl #6501); a call that cannot be read is answered with the reason (verl drops
it, and the trajectory ends); calls beyond the limit are answered, not ignored; thinking is no place for calls.

Why not PyPI's ``renderers`` 0.1.12, which does the same with hand-written templates: it finds them by the exact
published name, so a fine-tune, a folder or a tokenizer made here gets a generic one that cannot bridge tool turns; it
has none for Qwen2.5; and it brings openai, openai-harmony, tiktoken and prime-pydantic-config along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from retrieval.ranges import PositiveInt
from rollout.protocols.base import PromptMode
from rollout.protocols.boxed import boxed, unwrapped
from rollout.protocols.chat_boundaries import ChatBoundaries
from rollout.protocols.text import DATASET, TextProtocol, fitting, read_template, shortened
from rollout.protocols.tool_calls import FORMS, READERS, MalformedCall, after_thinking
from rollout.tools.schemas import read_schemas, tool_names
from rollout.trajectory import Action, ActionKind, Task, ToolResult

PURPOSES = {"search": " to look something up", "code_interpreter": " to compute or to check something"}
CUT = "Your last turn was cut off before it ended, so it was not read. Write less in one turn."
UNCLOSED = "The thinking of your last turn was never closed with </think>, so nothing in it was read."
UNREADABLE = "The tool call could not be read: {reason}. Write calls in exactly this form:\n{form}"
NOT_EXECUTED = "Only the first {limit} of the {found} tool calls of this turn were executed; the others were not."


def boxed_instruction(tools: Sequence[str]) -> str:
    """How to answer a question, with the purposes of the tools that the prompt shows."""
    if not tools:
        return "{question}\n\nReason step by step. Put the final answer in \\boxed{}."
    purposes = [PURPOSES.get(tool, "") for tool in tools]
    help_you = ",".join(purposes) if all(purposes) else ""  # the schemas of your own tools say what these are for
    return (
        f"{{question}}\n\nReason step by step. Use the tools wherever they help you{help_you}. Once you are sure, call "
        "no tool any more and put the final answer in \\boxed{}."
    )


class HermesProtocol(TextProtocol):
    """Prompts, tool calls and tool results in the chat format of one model.

    A turn ends with an end-of-turn token, which stays in it. What follows the last ``</think>`` is read: with tool
    calls the turn is a CALL, without one an ANSWER, the content of its last ``\\boxed{}`` (None where nothing is boxed;
    the trajectory ends then, too). A turn that was cut, whose thinking is not closed, or with a call that cannot be
    read is INVALID: the reason comes back as a tool's result, and the trajectory goes on.

    Args:
        tokenizer: Hugging Face folder with a chat template.
        tools: what the model may call: names of ``rollout.tools.schemas.SCHEMAS``, JSON files with a schema, or
            schemas themselves.
        show_tools: give the schemas to the template; false for tiny models that were trained without.
        instruction: the text of the user's turn about the question: ``none`` (the question alone), ``boxed`` (how to
            answer and what the shown tools are for, in our words), a file with your own text, or the text itself, which
            must hold ``{question}``. Or ``dataset``: the messages of the task's own ``prompt``, word by word.
        thinking: passed to the template as ``enable_thinking``; by default the template decides.
        max_parallel_calls: calls of one turn that are executed; the model is told that further ones were not.
        call_format: ``hermes`` (``<tool_call>`` tags) or ``llama3`` (a JSON object); ``auto`` takes what the template
            writes, and hermes where it writes no calls. ``verl``: hermes as released with verl: calls that cannot be
            read are none, so that a turn of only such calls ends the trajectory; calls inside thinking count; of
            calls beyond the limit the model is told nothing.
        newline: keep the line break that the template writes behind an end of turn; false: as released with verl,
            whose loop forgets it (verl #6501).

    Raises:
        ValueError: a template without tools, tool messages or a stop token at the end of a turn, or one that cannot be
            cut there exactly; ``thinking`` for a template without such a choice; an unknown tool or instruction.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: str,
        tools: Sequence[str | dict[str, Any]] = ("code_interpreter",),
        show_tools: bool = True,
        instruction: str = "none",
        thinking: bool | None = None,
        max_parallel_calls: PositiveInt = 1,
        call_format: Literal["auto", "hermes", "llama3", "verl"] = "auto",
        newline: bool = True,
    ) -> None:
        super().__init__(tokenizer, eos_ends=False)
        if max_parallel_calls < 1:
            raise ValueError(f"max_parallel_calls is {max_parallel_calls}; expected at least 1")
        if not tools:
            raise ValueError("tools is empty; name at least one tool that the model may call")
        schemas = read_schemas(tools)
        self.tools = tool_names(schemas)
        shown = schemas if show_tools else ()
        built_in = {"none": "{question}", "boxed": boxed_instruction(tool_names(shown))}
        self.instruction = DATASET if instruction == DATASET else read_template(instruction, built_in)
        self.chat = ChatBoundaries(self.tokenizer, self.stop_token_ids, shown, thinking, newline)
        self._check_shown(show_tools)
        self.call_format = self.chat.call_format() if call_format == "auto" else call_format
        self.max_parallel_calls = max_parallel_calls

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """[P] ids of the template with tools and the header of the assistant's turn; CLOSED_BOOK: without tools.

        Raises ValueError if the question is empty, the instruction is ``dataset`` and the task has no prompt, what is
        shown of the task quotes a control token, or for a gold mode: its passages would be an assistant's words.
        """
        if mode not in (PromptMode.AGENT, PromptMode.CLOSED_BOOK):
            raise ValueError(
                f"mode {mode} shows gold passages as the beginning of the assistant's turn, which a chat of tool calls "
                "has no place for; expected agent or closed_book (take search_r1 or arpo_tags for ARCap's probes)"
            )
        messages = self._advised(task, self._messages(task))
        return self.chat.ids(self.chat.render(messages, tools=mode is PromptMode.AGENT))

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """The action of one turn; see the class."""
        turn, ended = self.chat.without_end(text)
        if not ended:
            return Action(ActionKind.INVALID, error=CUT, ended=False)
        verl = self.call_format == "verl"
        said = turn if verl else after_thinking(self.chat.opened + turn)
        if said is None:
            return Action(ActionKind.INVALID, error=UNCLOSED)
        try:
            calls = READERS[self.call_format](said)
        except MalformedCall as fault:
            error = UNREADABLE.format(reason=fault, form=FORMS[self.call_format])
            return Action(ActionKind.INVALID, error=error)
        if not calls:
            content = boxed(said)
            return Action(ActionKind.ANSWER, answer=None if content is None else unwrapped(content))
        limit = self.max_parallel_calls
        note = NOT_EXECUTED.format(limit=limit, found=len(calls)) if len(calls) > limit and not verl else None
        return Action(ActionKind.CALL, calls[:limit], error=note)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Ids of everything up to the model's next token, and whether text was cut: the end of the turn where the model
        did not get to it, a tool message for each result and one for ``action.error``, the header of the next turn.
        Where the budget is too small, the middle of the longest texts is left out; ``([], True)`` if not even the
        template's own tokens fit."""
        texts = [result.text.strip() for result in results] + ([action.error] if action.error else [])
        longest = max(map(len, texts), default=0)
        return fitting(lambda limit: self._observation(action, texts, limit), longest, budget)

    def _observation(self, action: Action, texts: Sequence[str], limit: int | None) -> list[int]:
        messages = [{"role": "tool", "content": text if limit is None else shortened(text, limit)} for text in texts]
        return self.chat.ids_after(messages, called=action.kind is ActionKind.CALL, ended=action.ended)

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.instruction == DATASET:
            return self._dataset_messages(task, otherwise="none")
        return [{"role": "user", "content": self.instruction.replace("{question}", self._question(task))}]

    def _check_shown(self, show_tools: bool) -> None:
        if missing := [name for name in self.tools if show_tools and name not in self.chat.header]:
            raise ValueError(
                f"the chat template does not show the tools it is given ({', '.join(missing)}); set show_tools: false "
                "for a model that was trained without, or take a tokenizer whose template has tools"
            )
