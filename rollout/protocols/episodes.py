"""verl-agent's protocol for environments with text actions (docs/algorithms/sdar.md).

Every turn reasons in ``<think>`` and acts in ``<action>``. With a window, each turn gets a separate prompt with only
the last turns (as published); without one, the episode is one conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar, Literal

from common.ranges import NonNegativeInt, PositiveInt
from rollout.environments.base import ACT
from rollout.protocols.base import FIRST_OBSERVATION, PromptMode, TurnPrompt
from rollout.protocols.chat_boundaries import ChatBoundaries
from rollout.protocols.episode_texts import HISTORIES, PastTurn, fill, read_texts
from rollout.protocols.text_protocol import TextProtocol, fitting, shortened
from rollout.trajectory import Action, ActionKind, Task, ToolCall, ToolRequest, ToolResult, Turn

Form = Literal["brackets", "search", "short"]
FORMS: dict[str, Form] = {
    "household": "brackets", "shopping": "brackets", "search": "search", "short": "short", "bare": "short",
}  # fmt: skip
TASK_SENTENCE = re.compile(r"your task is to: *(.+)", re.IGNORECASE)
ACTION = "<action>", "</action>"
CJK = re.compile(r"[\u4e00-\u9fff]")
PAGE_BREAK = " [SEP] "


class EpisodeProtocol(TextProtocol):
    """Writes prompts and reads actions for environments that list admissible actions and describe results.

    A turn's action is the text between its first ``<action>`` and the first ``</action>``, by default in lower case. As
    in the released code, a turn without them acts with its last characters, and is not well-formed. Neither is a turn
    without ``<think>`` and ``</think>`` (if thinking is required) or with Chinese characters. The environment decides
    whether an action is admissible.

    In one conversation, an observation longer than ``max_observation_tokens`` loses its middle, never the list of
    actions, so leave room for both.

    Args:
        tokenizer: Hugging Face folder with a chat template.
        texts: texts of the prompts: household, shopping, short (for tiny models), bare (without admissible actions), or
            ``first``, ``later`` and ``after``, each a file or the text itself (see ``episode_texts``).
        window: number of past turns in each turn's prompt (published: 2; search: 4); the oldest are left out of a
            prompt that would be too long. null: one conversation with all turns.
        form: form of past turns and admissible actions; by default that of ``texts``.
        require_thinking: a turn without thinking is not well-formed.
        fallback_characters: characters of a turn without an action that are sent as one (published: 30 household, 20
            shopping).
        thinking: passed to the chat template as ``enable_thinking``; by default the template decides.
        lower: turn a turn's text to lower case (published). false for environments whose actions have capitals.

    Raises:
        ValueError: no chat template, or one that cannot be cut exactly; wrong texts.
    """

    tools: ClassVar[tuple[str, ...]] = (ACT,)
    stop: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: str,
        texts: str | dict[str, str],
        window: NonNegativeInt | None = 2,
        form: Form | None = None,
        require_thinking: bool = True,
        fallback_characters: PositiveInt = 30,
        thinking: bool | None = None,
        lower: bool = True,
    ) -> None:
        super().__init__(tokenizer, eos_ends=False)
        self.lower = lower
        self.texts = read_texts(texts)
        self.form: Form = form or (FORMS[texts] if isinstance(texts, str) else "brackets")
        self.window, self.require_thinking = window, require_thinking
        self.fallback_characters = fallback_characters
        self.chat = ChatBoundaries(self.tokenizer, self.stop_token_ids, thinking=thinking)

    @property
    def per_turn_prompts(self) -> bool:
        return self.window is not None

    # ------------------------------------------------------------------ prompts
    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]:
        """Return the token ids [P] of the first turn's prompt. Raises ValueError if the task has no first observation,
        or if ``mode`` is not AGENT."""
        if mode is not PromptMode.AGENT:
            raise ValueError(f"mode {mode} asks for an answer without acting, which an episode does not allow")
        if not task.question.strip():
            raise ValueError(f"task {task.id}: shows nothing to begin with; expected a first observation")
        return self._prompt(task, self._first(task))

    def turn_prompt(
        self,
        task: Task,
        turns: Sequence[Turn],
        calls: Sequence[ToolCall],
        limit: int | None = None,
        shown: int | None = None,
        sampled: Sequence[Sequence[int]] = (),
    ) -> TurnPrompt:
        """Return the prompt (token ids) of the next turn (see ``PerTurnPrompts``)."""
        past_turns = self._past_turns(task, turns, calls)
        wanted = min(self.window or 0, len(past_turns)) if shown is None else shown
        for past in range(wanted, -1, -1):
            ids = self._prompt(task, self._later(task, past_turns, past, calls)) if turns else self.prompt_ids(task)
            if limit is None or len(ids) <= limit:
                return TurnPrompt(tuple(ids), past, past < wanted)
        return TurnPrompt((), 0, True)

    def _prompt(self, task: Task, text: str) -> list[int]:
        return self.chat.prompt_ids(self._with_skills(task, [{"role": "user", "content": text}]))

    def _first(self, task: Task) -> str:
        facts = task.metadata.get(FIRST_OBSERVATION, {})
        goal, actions = self._goal(task), self._actions(facts)
        shown = self._shown(task.question) if "{task}" in self.texts.first else task.question.strip()
        return self._filled(self.texts.first, {"task": goal, "observation": shown, "actions": actions})

    def _later(self, task: Task, past_turns: Sequence[PastTurn], shown: int, calls: Sequence[ToolCall]) -> str:
        past = [PastTurn(*map(self.quotes.quote, astuple(turn))) for turn in past_turns[len(past_turns) - shown :]]
        facts = next((call.result.info for call in reversed(calls) if call.turn == len(past_turns) - 1), {})
        values = {
            "task": self._goal(task),
            "history": HISTORIES[self.form](past, len(past_turns) - shown + 1),
            "taken": str(len(past_turns)),
            "shown": str(shown),
            "step": str(len(past_turns) + 1),
            "observation": self._shown(past_turns[-1].result),
            "actions": self._actions(facts),
        }
        return self._filled(self.texts.later, values)

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        """Fill the placeholders of the template ``text``. Tags in the ``values`` become ordinary text; tags of the
        template stay."""
        return fill(text, {k: v if k == "history" else self.quotes.quote(v) for k, v in values.items()})

    def _goal(self, task: Task) -> str:
        """Return the task's goal from the first observation: its sentence, its instruction, or all of it."""
        instruction, _ = _after_instruction(task.question)
        if instruction:
            return instruction
        found = TASK_SENTENCE.search(task.question)
        return found[1].strip() if found else task.question

    def _past_turns(self, task: Task, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> list[PastTurn]:
        past_turns: list[PastTurn] = []
        seen = self._shown(task.question)
        for k, turn in enumerate(turns):
            result = "\n".join(call.result.text.strip() for call in calls if call.turn == k)
            result = result or (turn.action.error or "")
            past_turns.append(PastTurn(seen, self._acted(turn.action), result))
            seen = self._shown(result)
        return past_turns

    def _acted(self, action: Action) -> str:
        return " ".join(str(call.arguments.get("action", "")) for call in action.calls)

    def _shown(self, text: str) -> str:
        """Return an observation as the prompt shows it. A shop's page loses the parts up to the instruction, which the
        prompt has. In brackets each part has quotes, as verl-agent shows WebShop's pages."""
        if self.form == "search" or PAGE_BREAK not in text:
            return text.strip()
        quote = "'" if self.form == "brackets" else ""
        return PAGE_BREAK.join(f"{quote}{part}{quote}" for part in _after_instruction(text)[1])

    def _actions(self, facts: Mapping[str, Any]) -> str:
        admissible = [action for action in facts.get("admissible", ()) if action != "help"]
        return ",\n ".join(f"'{a}'" for a in admissible) if self.form == "brackets" else ", ".join(admissible)

    # ------------------------------------------------------------------ turns
    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """Return the action of one turn's text, always a CALL; see the class."""
        said, ended = self.chat.without_end(text)
        said = self.chat.opened + said
        said = said.lower() if self.lower else said
        opening, closing = ACTION
        start, stop = said.find(opening), said.find(closing)
        found = 0 <= start < stop
        action = said[start + len(opening) : stop].strip() if found else said[-self.fallback_characters :]
        return self._call(ToolRequest(ACT, {"action": action}), self._fault(said, found), ended)

    def _fault(self, said: str, found: bool) -> str | None:
        if not found:
            return "no <action> with its </action>"
        if self.require_thinking and not ("<think>" in said and "</think>" in said):
            return "no <think> with its </think>"
        return "Chinese characters" if CJK.search(said) else None

    def _call(self, request: ToolRequest, fault: str | None, ended: bool) -> Action:
        return Action(ActionKind.CALL, (request,), error=fault, ended=ended, well_formed=fault is None)

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Return the token ids of a user's turn with the action's result, and whether text was cut (its middle is left
        out). The ids reach up to the model's next token. Returns ``([], True)`` if the template's tokens do not fit."""
        text = "\n".join(result.text.strip() for result in results) or (action.error or "")
        facts = results[-1].info if results else {}
        shown = self._shown(text)

        def write(limit: int | None) -> list[int]:
            kept = shown if limit is None else shortened(shown, limit)
            content = self._filled(self.texts.after, {"observation": kept, "actions": self._actions(facts)})
            return self.chat.ids_after([{"role": "user", "content": content}], ended=action.ended)

        return fitting(write, len(shown), budget)


def _after_instruction(page: str) -> tuple[str, list[str]]:
    """Return the instruction of a shop's page ("" without one), and the parts that follow it."""
    parts = page.strip().split(PAGE_BREAK)
    if "Instruction:" not in parts[:-1]:
        return "", parts
    index = parts.index("Instruction:") + 1
    return parts[index], parts[index + 1 :]
