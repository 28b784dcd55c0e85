"""Limits of a trajectory, and the prompt that an agent reads first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rollout.protocols.base import ChatProtocol, PerTurnPrompts, PromptMode
from rollout.skills.injection import Skills
from rollout.skills.render import token_counter
from rollout.tokenizer import template_errors
from rollout.trajectory import Task


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a trajectory. All counts are tokens, except ``max_turns`` and ``step_timeout_s``.

    Search-R1 allows four turns with calls and then one more turn, whose calls are refused (``final_turn``). Without
    ``final_turn`` the environment still acts on the last turn, because an environment that scores itself needs to. It
    executes and counts the calls of that turn, and the model never reads their results (SOD's released code stops
    before them; the tokens are the same).
    """

    max_turns: int = 4
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_response_tokens: int = 4096  # everything after the prompt
    max_length: int | None = None  # prompt and response together: the engine's limit
    final_turn: bool = True
    step_timeout_s: float | None = None  # for the environment to act once
    limit_eos: bool = False  # a call beyond max_turns is followed by an EOS that is trained like a sampled token

    def __post_init__(self) -> None:
        for name in ("max_turn_tokens", "max_observation_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.max_turns < (0 if self.final_turn else 1):
            raise ValueError(f"max_turns is {self.max_turns}; expected at least one turn in all")
        if self.step_timeout_s is not None and not self.step_timeout_s > 0:
            raise ValueError(f"step_timeout_s is {self.step_timeout_s}; expected seconds above 0, or null for no limit")

    def room(self, held: int, response: int) -> int:
        """Tokens that may still be sampled; 0 or less: none.

        Args:
            held: tokens that the next one is sampled after: prompt and response, or a turn's own prompt and what there
                is of the turn.
            response: tokens of the response so far.
        """
        room = self.max_response_tokens - response
        return room if self.max_length is None else min(room, self.max_length - held)

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt of a turn with its own prompt: it leaves the tokens of a whole turn."""
        return None if self.max_length is None else self.max_length - self.max_turn_tokens


@dataclass(frozen=True, slots=True)
class FirstPrompts:
    """Writes the prompt that an agent reads first. ``skills``: advice that the prompt gives, None for no advice."""

    protocol: ChatProtocol
    budgets: Budgets
    skills: Skills | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt that leaves a token (with a window: a whole turn) to sample, or None."""
        if isinstance(self.protocol, PerTurnPrompts) and self.protocol.per_turn_prompts:
            return self.budgets.max_prompt_tokens
        return None if self.budgets.max_length is None else self.budgets.max_length - 1

    def with_skills(self, task: Task) -> Task:
        """The task with the advice of the skills. Raises ValueError, see ``Skills.inject``."""
        if self.skills is None:
            return task
        count = token_counter(self.protocol.tokenizer)
        return dataclasses.replace(task, skills=self.skills.inject(task, task.question, count).text)

    def prompt_ids(self, task: Task) -> list[int]:
        """[P] ids. Raises ValueError where the protocol refuses the task, or the skills do not fit."""
        return written(self.protocol, self.with_skills(task), PromptMode.AGENT)


def written(protocol: ChatProtocol, task: Task, mode: PromptMode) -> list[int]:
    """[P] ids of a prompt, at least one. Raises ValueError where the protocol or its chat template refuses the task, or
    writes nothing."""
    with template_errors(protocol.tokenizer):
        ids = protocol.prompt_ids(task, mode)
    if not ids:
        raise ValueError(f"task {task.id}: its prompt has no token; expected a chat template that writes the messages")
    return ids
