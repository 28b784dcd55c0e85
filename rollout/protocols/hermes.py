"""Tool calling in a model's chat format: template, call syntax, exact tokens between turns.

Source: the Hermes format of Qwen2.5 and Qwen3 (docs/algorithms/sod.md), the JSON calls of Llama 3, and the formats
listed in docs/chat_formats.md. Differences from verl: the line break after an end of turn is kept (verl #6501); a call
that cannot be read is answered with the reason (verl drops it, and the trajectory ends); calls beyond the limit are
answered; calls inside thinking are not executed.

PyPI's ``renderers`` 0.1.12 does the same with hand-written templates. It finds them by the exact published name, so a
fine-tune or a folder gets a generic template that cannot bridge tool turns. It has none for Qwen2.5, and depends on
openai, openai-harmony, tiktoken and prime-pydantic-config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from common.ranges import PositiveInt
from rollout.protocols.base import PromptMode, TurnPrompt
from rollout.protocols.call_formats import MalformedCall, UnclosedThinking, with_tool_text
from rollout.protocols.call_readers import HARMONY, VERL, choose_reader, reader_without_tools
from rollout.protocols.chat_boundaries import ChatBoundaries, Message
from rollout.protocols.text_protocol import DATASET, TextProtocol, fitting, read_template, shortened
from rollout.tags import boxed, unwrapped
from rollout.tokenizer import render_chat
from rollout.tools.schemas import read_schemas, tool_names
from rollout.tools.search import format_passages
from rollout.trajectory import Action, ActionKind, Task, ToolCall, ToolResult, Turn

ToolsIn = Literal["auto", "template", "system", "none", "trained"]

MAX_CALLS = 1000  # in one turn, without a limit
PURPOSES = {"search": " to look something up", "code_interpreter": " to compute or to check something"}
CUT = "Your last turn was cut off before it ended, so it was not read. Write less in one turn."
UNCLOSED = "The thinking of your last turn was never closed with {closing}, so nothing in it was read."
UNREADABLE = "The tool call could not be read: {reason}. Write calls in exactly this form:\n{form}"
NOT_EXECUTED = "Only the first {limit} of the {found} tool calls of this turn were executed; the others were not."


def boxed_instruction(tools: Sequence[str]) -> str:
    """Return the instruction that tells the model how to answer a question, with the purposes of the tools in the
    prompt."""
    if not tools:
        return "{question}\n\nReason step by step. Put the final answer in \\boxed{}."
    purposes = [PURPOSES.get(tool, "") for tool in tools]
    help_you = ",".join(purposes) if all(purposes) else ""  # the schemas of your tools describe their purposes
    return (
        f"{{question}}\n\nReason step by step. Use the tools wherever they help you{help_you}. Once you are sure, call "
        "no tool any more and put the final answer in \\boxed{}."
    )


class HermesProtocol(TextProtocol):
    """Writes prompts and tool results, and reads tool calls, in the chat format of one model.

    A turn ends with an end-of-turn token, which stays in it. The protocol reads the text behind its thinking. With tool
    calls the turn is a CALL. Without one it is an ANSWER, the content of its last ``\\boxed{}`` (None without a box),
    and ends the trajectory. A turn that was cut, has unclosed thinking, or has a call that cannot be read is INVALID:
    the reason comes back as a tool's result, and the trajectory goes on.

    Args:
        tokenizer: Hugging Face folder with a chat template.
        tools: tools that the model may call: names of ``rollout.tools.schemas.SCHEMAS``, JSON files of schemas, or
            schemas themselves. Empty: every turn is an answer.
        tools_in: place of the tools in the prompt. ``template``: the chat template gets the schemas. ``system``: the
            system message lists the schemas and the form of a call, for templates without tools. ``none``: nowhere;
            ``instruction`` must name them. ``trained``: nowhere, for a model that was trained to call them unasked.
            ``auto``: template if the template shows tools and writes calls and results, else system.
        instruction: text of the user's turn about the question: ``none`` (the question alone), ``boxed`` (how to answer
            and the purposes of the shown tools, in our words), a file with your own text, or the text itself with
            ``{question}``, and ``{passages}`` where the task's gold passages go. Or ``dataset``: the messages of the
            task's ``prompt``, word by word.
        thinking: passed to the template as ``enable_thinking``; by default the template decides.
        max_parallel_calls: calls of one turn that are executed; the model is told that further ones were not. null: as
            many as the template can write.
        call_format: reader of calls: ``hermes`` (``<tool_call>`` tags), ``llama3`` (a JSON object), ``harmony``
            (gpt-oss), a tool parser of vLLM's, such as ``minimax_m2``, or the dotted path of your function (see
            ``call_reader``). ``auto`` takes the first that reads back the calls that the template writes. ``verl``:
            hermes as released with verl: calls that cannot be read are dropped, and a turn of only such calls ends the
            trajectory; calls inside thinking count; the model is not told about calls beyond the limit.
        history: earlier turns as the model reads them. ``sampled``: its tokens, thinking included, in one conversation.
            ``template``: a new prompt for every turn; the template writes the earlier turns as a chat server
            would (Qwen3 drops thinking before the latest question, QwQ drops all of it).
        newline: keep the line break that the template writes behind an end of turn; false: as released with verl, whose
            loop forgets it (verl #6501).

    Raises:
        ValueError: a template without a stop token at the end of a turn, or one that cannot be cut there exactly; calls
            that are not read back; ``thinking`` for a template without such a choice; an unknown tool or instruction;
            an instruction that does not name tools which the prompt shows nowhere else.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: str,
        tools: Sequence[str | dict[str, Any]] = ("code_interpreter",),
        tools_in: ToolsIn = "auto",
        instruction: str = "none",
        thinking: bool | None = None,
        max_parallel_calls: PositiveInt | None = 1,
        call_format: str = "auto",
        history: Literal["sampled", "template"] = "sampled",
        newline: bool = True,
    ) -> None:
        super().__init__(tokenizer, eos_ends=False)
        schemas = read_schemas(tools)
        self.tools = tool_names(schemas)
        self.tools_in, self.chat = self._chat_with(schemas, tools_in, thinking, newline)
        shown = self.tools if self.tools_in in ("template", "system") else ()
        built_in = {"none": "{question}", "boxed": boxed_instruction(shown)}
        self.instruction = DATASET if instruction == DATASET else read_template(instruction, built_in)
        if self.instruction != DATASET:
            self._check_named(self.instruction, "the instruction")
        if schemas:
            self.reader, several = choose_reader(self.chat, call_format, schemas)
        else:
            self.reader, several = reader_without_tools(self.tokenizer, self.chat.thinking_tags), True
        self.call_format = self.reader.name
        if not several and (max_parallel_calls or 1) > 1:
            raise ValueError(
                f"max_parallel_calls is {max_parallel_calls}, but {self.chat.where} cannot write two calls in a turn; "
                "expected 1 or null"
            )
        self.max_parallel_calls = (max_parallel_calls or MAX_CALLS) if several else 1
        if history == "template" and self.call_format == HARMONY:
            raise ValueError("history is template, but a harmony template stores thinking separately; expected sampled")
        self.history = history

    @property
    def per_turn_prompts(self) -> bool:
        return self.history == "template"

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """Return the token ids [P] of a task's prompt, with tools and the header of the assistant's turn; CLOSED_BOOK:
        without tools.

        Raises ValueError if the question is empty, the instruction is ``dataset`` and the task has no prompt, the
        task's text quotes a control token, or for a gold mode, whose passages would be an assistant's words.
        """
        if mode not in (PromptMode.AGENT, PromptMode.CLOSED_BOOK):
            raise ValueError(
                f"mode {mode} shows gold passages as the beginning of the assistant's turn, which a chat of tool calls "
                "cannot hold; expected agent or closed_book (take search_r1 or arpo_tags for "
                "ARCap's diagnostic prompts)"
            )
        messages = self._with_skills(task, self._messages(task))
        return self.chat.ids(self.chat.render(messages, tools=mode is PromptMode.AGENT))

    def turn_prompt(
        self,
        task: Task,
        turns: Sequence[Turn],
        calls: Sequence[ToolCall],
        limit: int | None = None,
        shown: int | None = None,
        sampled: Sequence[Sequence[int]] = (),
    ) -> TurnPrompt:
        """Return the prompt (token ids) of the next turn with all earlier turns; results in a long prompt lose their
        middle."""
        if not turns:
            return TurnPrompt(tuple(self.prompt_ids(task)), 0, False)
        prompt = self._with_skills(task, self._messages(task))
        texts = {
            k: self._texts(turn.action, [call.result for call in calls if call.turn == k])
            for k, turn in enumerate(turns)
        }

        def write(characters: int | None) -> list[int]:
            messages = self.chat.hide(prompt)
            for k, turn in enumerate(turns):
                results = texts[k] if characters is None else [shortened(text, characters) for text in texts[k]]
                messages += [self._said(turn.action, self.decode(sampled[k])), *self._results(turn.action, results)]
            return self.chat.quotes.ids(self.chat.render(messages))

        longest = max((len(text) for found in texts.values() for text in found), default=0)
        ids, cut = fitting(write, longest, limit) if limit is not None else (write(None), False)
        return TurnPrompt(tuple(ids), len(turns) if ids else 0, cut)

    def _said(self, action: Action, text: str) -> Message:
        """Return an earlier turn as a chat message. Its tags are text, except those of its thinking."""
        turn, _ = self.chat.without_end(text)
        turn = self.chat.opened + turn
        try:
            said, _ = self.reader.read(turn)
        except ValueError:
            said = turn
        thinking = self.chat.quotes.quote_special(turn[: len(turn) - len(said)])
        if action.kind is not ActionKind.CALL:
            return {"role": "assistant", "content": thinking + self.chat.quotes.quote(said)}
        before = said.partition(self.reader.beginning)[0].rstrip() if self.reader.beginning else ""
        message = self.chat.message(action.calls, self.chat.quotes.quote)
        return message | {"content": thinking + self.chat.quotes.quote(before)}

    def _results(self, action: Action, texts: Sequence[str]) -> list[Message]:
        role = "tool" if action.kind is ActionKind.CALL else self.chat.answer_role
        return [{"role": role, "content": self.chat.quotes.quote(text)} for text in texts]

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """Return the action of one turn's text (call, answer or invalid); see the class."""
        turn, ended = self.chat.without_end(text)
        if not ended:
            return Action(ActionKind.INVALID, error=CUT, ended=False)
        try:
            said, calls = self.reader.read(self.chat.opened + turn)
        except UnclosedThinking:
            return Action(ActionKind.INVALID, error=UNCLOSED.format(closing=self.chat.thinking_tags[1]))
        except MalformedCall as fault:
            return Action(ActionKind.INVALID, error=UNREADABLE.format(reason=fault, form=self.reader.form))
        if not calls:
            content = boxed(said)
            return Action(ActionKind.ANSWER, answer=None if content is None else unwrapped(content))
        limit = self.max_parallel_calls
        told = len(calls) > limit and self.call_format != VERL
        note = NOT_EXECUTED.format(limit=limit, found=len(calls)) if told else None
        return Action(ActionKind.CALL, calls[:limit], error=note)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Return the token ids of a turn's tool results, up to the model's next token, and whether text was cut.

        They have the end of the turn if the model did not write it, a tool message for each result and one for
        ``action.error``, and the header of the next turn. A small budget leaves out the middle of the longest texts.
        Returns ``([], True)`` if the template's tokens do not fit.
        """
        names = tuple(call.name for call in action.calls)
        texts = self._texts(action, results)
        longest = max(map(len, texts), default=0)
        return fitting(lambda limit: self._observation(action, names, texts, limit), longest, budget)

    def _texts(self, action: Action, results: Sequence[ToolResult]) -> list[str]:
        """Return the tool results and errors that follow a turn, one text per message."""
        texts = [result.text.strip() for result in results] + ([action.error] if action.error else [])
        names = tuple(call.name for call in action.calls)
        if len(texts) > len(names) > 0 and not self.chat.takes_results(names, len(texts)):
            texts[-2:] = ["\n\n".join(texts[-2:])]  # a template that wants a call for every result
        return texts

    def _observation(self, action: Action, names: Sequence[str], texts: Sequence[str], limit: int | None) -> list[int]:
        messages = [{"role": "tool", "content": text if limit is None else shortened(text, limit)} for text in texts]
        return self.chat.ids_after(messages, called=names, ended=action.ended)

    def _chat_with(
        self, schemas: Sequence[dict[str, Any]], tools_in: ToolsIn, thinking: bool | None, newline: bool
    ) -> tuple[ToolsIn, ChatBoundaries]:
        """Choose the place of the tools in the prompt. Returns it, and the chat (``ChatBoundaries``) for it."""

        def chat(shown: Sequence[dict[str, Any]]) -> ChatBoundaries:
            return ChatBoundaries(self.tokenizer, self.stop_token_ids, shown, thinking, newline)

        if not schemas or not self.tokenizer.chat_template:  # which the chat refuses
            return "none", chat(())
        if tools_in in ("auto", "template"):
            told, untold = self._header(schemas), self._header(())
            missing = [name for name in self.tools if told.count(name) <= untold.count(name)]
            try:
                own = None if missing else chat(schemas)
            except ValueError as error:
                raise ValueError(f"{error}; or try tools_in: system, which writes calls and results as text") from error
            if own is not None and own.writes_calls:
                return "template", own
            if tools_in == "template":
                what = f"does not show the tools it is given ({', '.join(missing)})" if missing else "writes no calls"
                raise ValueError(
                    f"tools_in is template, but the chat template of {self.tokenizer.name_or_path!r} {what}; expected "
                    "tools_in: system, or a tokenizer whose template has tools"
                )
            tools_in = "system"
        if tools_in == "system" or not chat(()).writes_calls:
            self.tokenizer.chat_template = with_tool_text(self.tokenizer)
        return tools_in, chat(schemas if tools_in == "system" else ())

    def _header(self, schemas: Sequence[dict[str, Any]]) -> str:
        """Return a question's prompt text with the tools ``schemas``; "" where the chat template refuses them."""
        question = [{"role": "user", "content": "question"}]
        try:
            return render_chat(self.tokenizer, question, tools=list(schemas) or None)
        except ValueError:
            return ""

    def _check_named(self, text: str, where: str) -> None:
        """Raise ValueError if the prompt's ``text`` does not name every tool, although no system message shows the
        tools (``tools_in: none``)."""
        unnamed = [name for name in self.tools if name not in text]
        if self.tools_in == "none" and unnamed:
            raise ValueError(
                f"tools_in is none, and {where} does not name {', '.join(unnamed)}; expected a text that says how to "
                "call the tools, or tools_in: system (or trained, for a model that calls them unasked)"
            )

    def _messages(self, task: Task) -> list[dict[str, str]]:
        if self.instruction == DATASET:
            messages = self._dataset_messages(task, otherwise="none")
            self._check_named("\n".join(message["content"] for message in messages), f"the prompt of task {task.id}")
            return messages
        texts = {"{question}": self._question(task)}
        if "{passages}" in self.instruction:
            texts["{passages}"] = self._passages(task)
        content = re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], self.instruction)
        return [{"role": "user", "content": content}]

    def _passages(self, task: Task) -> str:
        if not task.gold_passages:
            raise ValueError(f"task {task.id}: the instruction has {{passages}}, and the task has no gold passages")
        passages = format_passages(task.gold_passages).strip()
        self._refuse_control_tokens(task, "a gold passage", passages)
        return passages
