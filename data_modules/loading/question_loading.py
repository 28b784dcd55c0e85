"""Loads questions for a data module: reads files, words prompts, leaves out those whose prompts are too long."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from data_modules.datasets.files import DatasetError, spread
from data_modules.datasets.question_file import FaultyRows
from data_modules.datasets.questions import load_tasks
from data_modules.datasets.splits import Part, Splits
from data_modules.datasets.tool_prompts import with_tool_prompts
from rollout.protocols.base import ChatProtocol
from rollout.protocols.text import DATASET, shows_task_prompts
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

Prompts = Literal["as_given", "tool_reasoning", "tool_reasoning_first_row"]


@dataclass(frozen=True, slots=True)
class QuestionLoading:
    """How files become questions.

    Args:
        protocol: whose prompts are counted; None only where nothing is loaded.
        prompts: ``as_given`` leaves tasks as their files have them; ``tool_reasoning`` sets their ``prompt`` to
            ``tool_prompts.tool_prompt``, for a protocol that shows it; ``tool_reasoning_first_row``: as the first task
            (``tool_prompts.with_tool_prompts``).
        lcb_examples: see ``tool_prompts.tool_prompt``.
        faulty_rows, answers, columns: see ``load_tasks``.
        splits: training, validation and test have the same files, of which each takes its part; None: files of its own.

    Raises:
        ValueError: prompts or faulty_rows is neither of its values, the protocol would not show the prompts made here,
            or lcb_examples is negative.
    """

    protocol: ChatProtocol | None
    prompts: Prompts = "as_given"
    lcb_examples: int | None = 2
    faulty_rows: FaultyRows = "refuse"
    answers: bool = True
    columns: Mapping[str, str] | None = None
    splits: Splits | None = None

    def __post_init__(self) -> None:
        if self.prompts not in get_args(Prompts):
            raise ValueError(f"prompts is {self.prompts!r}; expected one of {', '.join(get_args(Prompts))}")
        if self.faulty_rows not in get_args(FaultyRows):
            raise ValueError(f"faulty_rows is {self.faulty_rows!r}; expected 'refuse' or 'drop'")
        if self.lcb_examples is not None and self.lcb_examples < 0:
            raise ValueError(f"lcb_examples is {self.lcb_examples}; expected at least 0")
        if self.prompts != "as_given" and self.protocol is not None and not shows_task_prompts(self.protocol):
            raise ValueError(
                f"prompts is {self.prompts!r}, which gives every task a prompt of its own, but "
                f"{type(self.protocol).__name__} words its prompts itself; give it '{DATASET}' as its template "
                "(HermesProtocol: instruction, ARPOProtocol: system), or leave prompts at 'as_given'"
            )

    def load(
        self,
        files: Sequence[str],
        limit: int | None,
        max_tokens: int | None,
        option: str,
        abilities: Sequence[str] | None = None,
        part: Part = "train",
    ) -> list[Task]:
        """The questions of ``files`` in order, of ``splits`` only those of ``part``: those with one of these abilities
        whose prompt has at most ``max_tokens`` tokens, and of these at most ``limit``, evenly spaced. ``option``: the
        configuration's name of ``max_tokens``.

        Raises:
            DatasetError: see ``load_tasks`` and ``with_tool_prompts``, or no question has such an ability, or is short
                enough.
            ValueError: the protocol refuses a question (see its ``prompt_ids``).
        """
        tasks = load_tasks(files, self.faulty_rows, self.answers, self.columns)
        if self.splits is not None:
            tasks = self.splits.part(tasks, part)
        if abilities is not None:
            tasks = with_abilities(tasks, abilities, ", ".join(files))
        tasks = self.worded(tasks)
        if max_tokens is not None and self.protocol is not None:
            tasks = short_enough(tasks, self.protocol, max_tokens, f"{', '.join(files)}: {option}")
        return spread(tasks, limit)

    def worded(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks with the prompts asked for. Raises DatasetError, see ``with_tool_prompts``."""
        if self.prompts == "as_given":
            return list(tasks)
        return with_tool_prompts(tasks, self.lcb_examples, self.prompts == "tool_reasoning_first_row")

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """What else than their ids tells questions apart, for the fingerprint of saved positions; () by default."""
        return () if self.prompts == "as_given" else (self.prompts, self.lcb_examples)


def with_abilities(tasks: Sequence[Task], abilities: Sequence[str], where: str) -> list[Task]:
    """The tasks whose ``metadata["ability"]`` is one of ``abilities``; how many others there are is logged.

    Args:
        where: the beginning of messages.

    Raises:
        DatasetError: none is left.
    """
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


def short_enough(tasks: Sequence[Task], protocol: ChatProtocol, max_tokens: int, where: str) -> list[Task]:
    """The tasks whose prompt is at most ``max_tokens`` long, as the protocol tokenises it for the agent: chat template
    and tool schemas are counted (the released filter leaves the tools out, docs/papers/sod.md section 4.5). How many
    were dropped is logged by data source.

    Args:
        where: the beginning of messages.

    Raises:
        DatasetError: none is left.
    """
    lengths = [len(protocol.prompt_ids(task)) for task in tasks]
    kept = [task for task, length in zip(tasks, lengths, strict=True) if length <= max_tokens]
    if not kept:
        raise DatasetError(
            f"{where} is {max_tokens}, but the shortest of {len(tasks)} prompts has {min(lengths)} tokens (chat "
            "template and tools are counted); raise it"
        )
    dropped = Counter(t.data_source for t, length in zip(tasks, lengths, strict=True) if length > max_tokens)
    if dropped:
        total = Counter(task.data_source for task in tasks)
        counts = ", ".join(f"{source} {count} of {total[source]}" for source, count in sorted(dropped.items()))
        logger.warning(
            "%s is %d: %d of %d questions with longer prompts (up to %d tokens) are left out: %s",
            where, max_tokens, sum(dropped.values()), len(tasks), max(lengths), counts,
        )  # fmt: skip
    return kept
