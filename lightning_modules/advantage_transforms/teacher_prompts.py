"""Prompts that a teacher reads instead of the student's, such as OPSD's with the answer (docs/algorithms/sod.md)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightning_modules.advantage_transforms.base import (
    Algorithm,
    ConfigRepr,
    per_turn_prompts,
    plays_programs,
    validate_choice,
)
from lightning_modules.batch import TokenBatch, aligned, with_prompts

if TYPE_CHECKING:
    from rollout.trajectory import Task, Trajectory

Privilege = Literal["answer", "hint"]

TEMPLATES: dict[str, str] = {
    "answer": (
        "{question}\n\nOnly you are told that the correct final answer is: {answer}\nSolve it all the same as if you "
        "had to find it: reason in steps, use the tools where they help, and end with this answer."
    ),
    "hint": (
        "{question}\n\nOnly you are told this about the way to the solution: {hint}\nSolve it in your own words, use "
        "the tools where they help, and do not mention what you were told."
    ),
}


class TeacherPrompts(ConfigRepr):
    """Base class of prompts for a teacher: the teacher scores the student's sampled response after its own prompt
    instead of the student's."""

    def check_data(self, algorithm: Algorithm, data: Any, questions: Sequence[Task] | None) -> None:
        """Refuse a data module for which the teacher's prompts cannot be rendered.

        Args:
            algorithm: whose teacher reads them.
            data: the data module.
            questions: its training questions that the teacher judges, where they are known.
        """

    def __call__(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[int] | None]:
        """Return the ids of the teacher's prompt for each trajectory, or None for one that it does not judge. The
        trajectories are the rows of this rank's rollout batch that the teacher judges, in whole groups."""
        raise NotImplementedError


class RenderedPrompts(TeacherPrompts):
    """Base of prompts with a text beside the question, which only the teacher reads. The rollout system's protocol
    renders them.

    Args:
        template: the teacher's question: a text with {question} and the field of this class.
    """

    FIELD = "told"  # where the text goes in the template

    def __init__(self, template: str) -> None:
        self.template = template
        for name in ("question", self.FIELD):
            if f"{{{name}}}" not in template:
                raise ValueError(f"template: expected {{{name}}} where the task's {name} goes; found {template!r}")

    def check_data(self, algorithm: Algorithm, data: Any, questions: Sequence[Task] | None) -> None:
        """Refuse per-turn prompts, programs, and data modules without a protocol."""
        if per_turn_prompts(data):
            raise ValueError(
                f"every turn has its own prompt, which {type(self).__name__} does not render; take window: null, or "
                "SDAR with signal: reverse_kl and gate: none, whose teacher reads skills"
            )
        protocol = getattr(getattr(data, "rollouts", None), "protocol", None)
        if protocol is None or questions is None or plays_programs(data):
            raise ValueError(
                f"{type(self).__name__} renders the teacher's prompts with the rollout system's protocol, but "
                f"{type(data).__name__} has none; train with a RolloutDataModule that plays tasks by a protocol"
            )

    def texts(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> Sequence[str | None]:
        """Return what the teacher is told for each trajectory, or None for nothing: it does not judge that one."""
        raise NotImplementedError

    def filled(self, task: Task, text: str) -> Task:
        """Return the task as the teacher reads it: its question, filled into the template with the text. If the task
        has a prompt, its last user message is filled in, too."""

        def fill(question: str) -> str:  # in one pass: braces in a question stay unchanged
            values = {"question": question, self.FIELD: text}
            return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), self.template)

        messages = list(task.prompt)
        users = [i for i, (role, _) in enumerate(messages) if role == "user"]
        if users:
            messages[users[-1]] = ("user", fill(messages[users[-1]][1]))
        return dataclasses.replace(task, question=fill(task.question), prompt=tuple(messages))

    def __call__(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[Sequence[int] | None]:
        protocol = algorithm.data.rollouts.protocol
        prompts: dict[tuple[str, str], list[int]] = {}  # by group and text
        read: list[Sequence[int] | None] = []
        for t, text in zip(trajectories, self.texts(algorithm, trajectories), strict=True):
            if text is None:
                read.append(None)
                continue
            if (t.group, text) not in prompts:
                if tuple(protocol.prompt_ids(t.task)) != t.prompt_ids:
                    raise ValueError(
                        f"task {t.task.id} was read by the policy otherwise than the protocol renders it (an "
                        "environment that opens with an observation?); the teacher's prompt could not be made like it"
                    )
                prompts[t.group, text] = protocol.prompt_ids(self.filled(t.task, text))
            read.append(prompts[t.group, text])
        return read


class PrivilegedPrompts(RenderedPrompts):
    """Adds the answer or a hint to the question that the teacher reads.

    Args:
        privilege: addition to the prompt: answer (the task's first golden answer) or hint (``metadata["hint"]``).
        template: the teacher's question: a text with {question} and {answer} or {hint}; null for the default.
    """

    def __init__(self, privilege: Privilege = "answer", template: str | None = None) -> None:
        self.privilege: Privilege = validate_choice("privilege", privilege, Privilege)
        self.FIELD = privilege
        super().__init__(TEMPLATES[privilege] if template is None else template)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(privilege={self.privilege!r}, template={self.template!r})"

    def check_data(self, algorithm: Algorithm, data: Any, questions: Sequence[Task] | None) -> None:
        """Refuse per-turn prompts, questions without an answer or hint, and prompts that cannot be rendered, such as a
        hint that quotes a control token."""
        super().check_data(algorithm, data, questions)
        for task in questions or ():
            privileged = self.privileged(task)
            try:
                data.rollouts.protocol.prompt_ids(privileged)
            except ValueError as error:
                raise ValueError(f"task {task.id} of {task.data_source}, told the {self.privilege}: {error}") from error

    def privileged(self, task: Task) -> Task:
        """Return the task as the teacher reads it. Raises ValueError if it has no answer or hint."""
        return self.filled(task, self._answer_or_hint(task))

    def _answer_or_hint(self, task: Task) -> str:
        found: Any = task.metadata.get("hint") if self.privilege == "hint" else next(iter(task.golden_answers), None)
        if not isinstance(found, str) or not found.strip():
            hint = self.privilege == "hint"
            where = 'metadata["hint"]' if hint else "a golden answer"
            way = "take files that have one" if hint else "leave programs out by data option abilities: [math, choice]"
            raise ValueError(
                f"privilege is {self.privilege}, but task {task.id} of {task.data_source} has none: expected a text as "
                f"{where}, found {found!r}; {way}, or tell the teacher something else"
            )
        return found

    def texts(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[str]:
        return [self._answer_or_hint(t.task) for t in trajectories]

    def __call__(self, algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> list[Sequence[int] | None]:
        read = super().__call__(algorithm, trajectories)
        known = [ids for ids in read if ids is not None]
        check_lengths(algorithm, known, trajectories, f"the {self.privilege}", "the length of what the data tell")
        return read


def after_prompts(
    score: Any, prompts: Sequence[Sequence[int]] | None, trajectories: Sequence[Trajectory], batch: TokenBatch
) -> Tensor:
    """Return log-probs [B, T] of the responses after other prompts (None: the responses' own prompts). They are aligned
    with the tokens of ``batch``."""
    if prompts is None:
        return score(batch)
    read = with_prompts(trajectories, prompts, batch)
    return aligned(score(read), read, batch)


def positions_of(algorithm: Algorithm) -> int | None:
    """Return the number of positions of the policy, or None if its configuration does not say it."""
    return getattr(getattr(algorithm.policy, "config", None), "max_position_embeddings", None)


def check_lengths(
    algorithm: Algorithm, prompts: Sequence[Sequence[int]], trajectories: Sequence[Trajectory], told: str, option: str
) -> None:
    """Raise ValueError if a teacher's prompt and its response are longer than the model's maximum number of positions.

    Args:
        told: the addition to the teacher's prompt, for the message.
        option: the option that bounds this addition.
    """
    known = positions_of(algorithm)
    lengths = [len(p) + len(t.response_ids) for p, t in zip(prompts, trajectories, strict=True)]
    if known is not None and max(lengths, default=0) > known:
        worst = trajectories[lengths.index(max(lengths))]
        raise ValueError(
            f"task {worst.task.id}: with {told} the teacher reads {max(lengths)} tokens, but the model has positions "
            f"for {known}; lower {option}, or the rollouts' max_length"
        )
