"""Loads questions for a data module: reads files, words prompts, leaves out questions with too long prompts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from data_modules.datasets.files import DatasetError, shown, spread
from data_modules.datasets.question_file import OnInvalidRow
from data_modules.datasets.questions import load_tasks
from data_modules.datasets.splits import Part, Splits
from data_modules.datasets.tool_prompts import with_tool_prompts
from rollout.loop.agent_loop import FirstPrompts
from rollout.protocols.base import ChatProtocol
from rollout.protocols.text_protocol import DATASET, shows_task_prompts
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

MOST_TOKENS = 8  # of a prompt for each character of its question: four bytes, in a template that shows it twice

Prompts = Literal["as_given", "tool_reasoning", "tool_reasoning_first_row"]


@dataclass(frozen=True, slots=True)
class QuestionLoading:
    """Reads question files and writes the prompts of their questions.

    Args:
        protocol: writes the prompts; null only where no file is loaded.
        prompts: ``as_given`` leaves tasks as their files have them; ``tool_reasoning`` sets their ``prompt`` to
            ``tool_prompts.tool_prompt``, for a protocol that shows it; ``tool_reasoning_first_row``: as the first task
            (``tool_prompts.with_tool_prompts``).
        lcb_examples: see ``tool_prompts.tool_prompt``.
        on_invalid_row, answers, columns: see ``load_tasks``.
        splits: shares the same files out among training, validation and test; null where each has its own files.

    Raises:
        ValueError: the protocol would not show the prompts made here.
    """

    protocol: ChatProtocol | None
    prompts: Prompts = "as_given"
    lcb_examples: int | None = 2
    on_invalid_row: OnInvalidRow = "refuse"
    answers: bool = True
    columns: Mapping[str, str] | None = None
    splits: Splits | None = None
    _read: dict[tuple[str, ...], list[Task]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.prompts != "as_given" and self.protocol is not None and not shows_task_prompts(self.protocol):
            raise ValueError(
                f"prompts is {self.prompts!r}, which words the prompt of every task, but "
                f"{type(self.protocol).__name__} words its prompts itself; give it '{DATASET}' as its template "
                "(HermesProtocol: instruction, ARPOProtocol: system), or leave prompts at 'as_given'"
            )

    def read(self, files: Sequence[str]) -> list[Task]:
        """Return all questions of ``files`` as tasks, in order, for ``select``. Raises DatasetError, see
        ``load_tasks``.
        """
        names = tuple(files)
        tasks = self._read.get(names)
        if tasks is None:
            tasks = load_tasks(files, self.on_invalid_row, self.answers, self.columns)
        if self.splits is not None:  # the parts share their files: read them, and log their faults, once
            self._read[names] = tasks
        return tasks

    def select(
        self,
        tasks: list[Task],
        where: str,
        limit: int | None,
        writer: FirstPrompts | None = None,
        max_tokens: int | None = None,
        abilities: Sequence[str] | None = None,
        part: Part = "train",
    ) -> list[Task]:
        """Return the questions of one split (training, validation, test) that the run uses. The log counts the
        questions left out.

        Args:
            where: the files, for messages.
            limit: at most so many questions, evenly spaced over those that are left.
            writer: of the prompts whose tokens are counted; null: count no tokens.
            max_tokens: leave out longer prompts. By default training leaves out prompts that leave no token to sample.
                An evaluation keeps these questions, which count as unanswered, and logs them.
            abilities: keep only questions with one of these abilities.
            part: of ``splits``, where there are any.

        Raises:
            DatasetError: see ``with_tool_prompts``, or no question is left.
            ValueError: the protocol refuses a question (see its ``prompt_ids``).
        """
        if self.splits is not None:
            tasks = self.splits.part(tasks, part)
        if abilities is not None:
            tasks = with_abilities(tasks, abilities, where)
        tasks = self.worded(tasks)
        if writer is None:
            return spread(tasks, limit)
        # An environment that scores itself shows an observation instead of the question: its length is not known here.
        room = writer.longest if self.answers else None
        if part == "train":
            tasks = short_enough(tasks, writer, max_tokens, room, f"{where}: max_prompt_tokens")
        else:
            tasks = short_enough(tasks, writer, max_tokens, None, f"{where}: max_eval_prompt_tokens")
            warn_of_unanswered(tasks, writer, room, where)
        return spread(tasks, limit)

    def worded(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks with the prompts that the option ``prompts`` asks for. Raises DatasetError, see
        ``with_tool_prompts``.
        """
        if self.prompts == "as_given":
            return list(tasks)
        return with_tool_prompts(tasks, self.lcb_examples, self.prompts == "tool_reasoning_first_row")

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """The settings that change prompts, for the fingerprint of a saved position in the data; () by default."""
        return () if self.prompts == "as_given" else (self.prompts, self.lcb_examples)


def with_abilities(tasks: Sequence[Task], abilities: Sequence[str], where: str) -> list[Task]:
    """Return the tasks whose ``metadata["ability"]`` is one of ``abilities``; the log counts the others."""
    found = Counter(str(task.metadata.get("ability", "none")) for task in tasks)
    counts = ", ".join(f"{ability} {count}" for ability, count in sorted(found.items()))
    kept = [task for task in tasks if task.metadata.get("ability") in abilities]
    if not kept:
        raise DatasetError(
            f"{where}: abilities is [{', '.join(abilities)}], but no question has one of them; those of the questions "
            f"are: {counts}"
        )
    if len(kept) < len(tasks):
        logger.warning(
            "%s: abilities is [%s]: %d of %d questions are left out (in all: %s)",
            where, ", ".join(abilities), len(tasks) - len(kept), len(tasks), counts,
        )  # fmt: skip
    return kept


def short_enough(
    tasks: list[Task], writer: FirstPrompts, max_tokens: int | None, room: int | None, where: str
) -> list[Task]:
    """Return the tasks whose first prompt has at most ``max_tokens`` and at most ``room`` tokens (None: no limit).

    Chat template, tool schemas and skills are counted (the released filter of SOD leaves the tools out). The log
    says how many tasks are left out, by data source, and the first ids.

    Args:
        where: the beginning of messages, which ends with the name of the option.

    Raises:
        DatasetError: no task is left.
    """
    limit = min((tokens for tokens in (max_tokens, room) if tokens is not None), default=None)
    if limit is None:
        return tasks
    lengths = prompt_lengths(tasks, writer, None if max_tokens is not None else room)
    said = f"{where} is {limit}" + (" (what max_length leaves)" if limit != max_tokens else "")
    if min(lengths) > limit:
        raise DatasetError(
            f"{said}, but the shortest of {len(tasks)} prompts has {min(lengths)} tokens (chat template and tools are "
            f"counted); raise {'it' if limit == max_tokens else 'max_length'}"
        )
    longer = [i for i, length in enumerate(lengths) if length > limit]
    if longer:
        logger.warning(
            "%s: %d of %d questions with longer prompts (up to %d tokens) are left out: %s",
            said, len(longer), len(tasks), max(lengths), _counted(tasks, longer),
        )  # fmt: skip
    return [task for task, length in zip(tasks, lengths, strict=True) if length <= limit]


def warn_of_unanswered(tasks: Sequence[Task], writer: FirstPrompts, room: int | None, where: str) -> None:
    """Log the evaluation questions whose prompts leave no token to sample. Raises DatasetError if that holds for
    all."""
    lengths = [] if room is None else prompt_lengths(tasks, writer, room)
    longer = [i for i, length in enumerate(lengths) if room is not None and length > room]
    if longer and len(longer) == len(tasks):
        raise DatasetError(
            f"{where}: max_length leaves {room} tokens for a prompt, but the shortest of {len(tasks)} prompts has "
            f"{min(lengths)} tokens; raise max_length"
        )
    if longer:
        logger.warning(
            "%s: %d of %d questions count as unanswered: their prompts (up to %d tokens) are longer than max_length "
            "leaves (%d): %s; to leave them out, take max_eval_prompt_tokens: %d",
            where, len(longer), len(tasks), max(lengths), room, _counted(tasks, longer), room,
        )  # fmt: skip


def prompt_lengths(tasks: Sequence[Task], writer: FirstPrompts, below: int | None = None) -> list[int]:
    """Return the number of tokens in each task's first prompt.

    With ``below``, 0 for a prompt that has surely at most so many tokens: a thousand prompts take a second to write,
    and of most questions the number of characters is enough to know.
    """
    if not tasks or below is None:
        return [len(writer.prompt_ids(task)) for task in tasks]
    sizes = [len(task.question) + sum(len(content) for _, content in task.prompt) for task in tasks]
    shortest = tasks[min(range(len(tasks)), key=sizes.__getitem__)]
    frame = len(writer.prompt_ids(shortest)) + (0 if writer.skills is None else writer.skills.max_tokens)
    return [
        len(writer.prompt_ids(task)) if frame + MOST_TOKENS * size > below else 0
        for task, size in zip(tasks, sizes, strict=True)
    ]


def _counted(tasks: Sequence[Task], chosen: Sequence[int]) -> str:
    """Return text for a message: how many of the ``chosen`` tasks each data source has, and their first ids."""
    total, counts = Counter(task.data_source for task in tasks), Counter(tasks[i].data_source for i in chosen)
    said = ", ".join(f"{source} {count} of {total[source]}" for source, count in sorted(counts.items()))
    return f"{said} (id {shown([tasks[i].id for i in chosen])})"
