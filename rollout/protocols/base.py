"""Interface of protocols: prompts, actions read from text, observations as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rollout.trajectory import Action, Task, ToolCall, ToolResult, Turn

# Keys of a task's metadata in an episode whose environment has a first observation: its ``FirstObservation.info``, and
# the task's question, which the observation's text replaces.
FIRST_OBSERVATION, OWN_QUESTION = "first_observation", "own_question"


class PromptMode(StrEnum):
    """How the prompt presents the task. The last two are ARCap's diagnostic prompts."""

    AGENT = "agent"  # the normal search loop
    GOLD_DIRECT = "gold_direct"  # gold passages given, answer at once, no thinking, no search
    GOLD_THINK = "gold_think"  # gold passages given in one <information> block, thinking allowed, no search
    CLOSED_BOOK = "closed_book"  # no passages, no search


class ChatProtocol(Protocol):
    """Writes prompts and observations as token ids, and reads actions from sampled ids. Each text is tokenised exactly
    once, and sampled ids are never encoded again."""

    tokenizer: Any  # Hugging Face's; only its length is used outside of the protocol
    tools: tuple[str, ...]  # names of the tools that its calls ask for
    stop: tuple[str, ...]  # stop strings of one model turn
    stop_token_ids: tuple[int, ...]  # EOS ids
    eos_ends: bool  # a turn that ends with EOS and has no action ends the trajectory; else it is INVALID

    def prompt_ids(self, task: Task, mode: PromptMode = PromptMode.AGENT) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled token ids, special tokens kept."""
        ...

    def parse(self, text: str, mode: PromptMode = PromptMode.AGENT) -> Action:
        """Return the action of one model turn, from the decoded text of its sampled tokens."""
        ...

    def observation_ids(self, action: Action, results: Sequence[ToolResult], budget: int) -> tuple[list[int], bool]:
        """Return the token ids of an observation, the model's next input, and whether text was dropped. There are at
        most ``budget`` ids, and every closing tag is kept. For an INVALID action ``results`` is empty and the
        observation is the protocol's correction."""
        ...


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    ids: tuple[int, ...]  # [P]; empty if the prompt does not fit, even without history
    shown: int  # past turns in the prompt
    cut: bool  # the limit left out turns of the window


@runtime_checkable
class PerTurnPrompts(Protocol):
    """A protocol that can write a separate prompt for every turn. ``observation_ids`` is then never called."""

    per_turn_prompts: bool  # whether it writes them

    def turn_prompt(
        self,
        task: Task,
        turns: Sequence[Turn],
        calls: Sequence[ToolCall],
        limit: int | None = None,
        shown: int | None = None,
        sampled: Sequence[Sequence[int]] = (),
    ) -> TurnPrompt:
        """Return the prompt (token ids) of the turn that follows ``turns`` (and their ``calls``).

        A function of its arguments: with another task (its ``skills``) and the number of past turns that the student
        was shown, it writes a privileged teacher's prompt.

        Args:
            limit: most ids; history is left out to keep it.
            shown: number of past turns to show, whatever the window.
            sampled: token ids of each of the ``turns``, for protocols that show the model's words.
        """
        ...


def sampled_turns(response_ids: Sequence[int], turns: Sequence[Turn]) -> list[Sequence[int]]:
    """Return the sampled token ids of each turn, cut from the token ids of the response."""
    return [response_ids[turn.start : turn.end] for turn in turns]
