"""Judges answers with an LLM judge that reads the question, the gold answers and the answer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from callbacks.evaluation_rows import AGENT, EvaluationRow
from rollout.trajectory import Task

log = logging.getLogger(__name__)


class JudgeProtocol(Protocol):
    """What an evaluation needs of a judge (rollout.rewards.judge has one).

    Annotated with Any where it takes a ``Sequence[tuple[str, Sequence[str], str]]`` of (question, gold answers,
    answer) and a callback of progress, and gives one verdict an item: jsonargparse takes a class for this protocol
    only if its annotations are the very same, or these are Any. A verdict has ``correct`` (None: the judge failed)
    and ``error``, the reason of a failure.
    """

    prompt_version: str  # which wording of the question; verdicts under different ones cannot be compared
    model: str

    def judge_all(self, items: Any) -> Any: ...


def judge_rows(judge: JudgeProtocol, rows: Sequence[EvaluationRow], tasks: Mapping[str, Task]) -> list[EvaluationRow]:
    """The rows with verdicts in ``judged``, in the same order. Right is what the reward calls right (``row.verdict``:
    mathematical equality, tests passed) or what the judge does (docs/papers/arpo.md section 7, llm_equal); no answer is
    wrong otherwise; neither is put to the judge. Exact match settles nothing, since it deletes signs ("-5" is "5" to
    it). Probes and rows that infrastructure spoiled are not judged. A judge that fails leaves ``judged`` None and sets
    ``judge_failed``.

    Args:
        tasks: by id, of all rows.

    Raises:
        ValueError: the judge gave another number of verdicts than it got answers.
    """
    judged = list(rows)
    asked: list[int] = []
    for i, row in enumerate(rows):
        if row.prompt_mode != AGENT or row.failed:
            continue
        if row.answer is None or row.verdict == 1.0:
            judged[i] = dataclasses.replace(row, judged=float(row.verdict == 1.0))
        else:
            asked.append(i)
    if not asked:
        return judged
    items = [(tasks[rows[i].id].question, tasks[rows[i].id].golden_answers, rows[i].answer) for i in asked]
    verdicts = judge.judge_all(items)
    if len(verdicts) != len(asked):
        raise ValueError(f"{type(judge).__name__} gave {len(verdicts)} verdicts on {len(asked)} answers")
    failures = [verdict.error for verdict in verdicts if verdict.correct is None]
    if failures:
        log.warning("the judge failed on %d of %d answers, last with: %s", len(failures), len(asked), failures[-1])
    for i, verdict in zip(asked, verdicts, strict=True):
        failed = verdict.correct is None
        value = None if failed else float(verdict.correct)
        judged[i] = dataclasses.replace(rows[i], judged=value, judge_failed=failed)
    return judged
