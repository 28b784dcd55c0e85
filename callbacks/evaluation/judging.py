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
    """The interface of the LLM judge that an evaluation calls (rollout.rewards.judge has one).

    ``judge_all`` takes a ``Sequence[tuple[str, Sequence[str], str]]`` of (question, gold answers, answer) and returns
    one verdict per item, with ``correct`` (None: the judge failed) and ``error``, the reason of a failure. It is
    annotated with Any because jsonargparse accepts a class for this protocol only if the annotations are equal or Any.
    """

    prompt_version: str  # which wording of the question; verdicts under different ones cannot be compared
    model: str

    def judge_all(self, items: Any) -> Any: ...


def judge_rows(judge: JudgeProtocol, rows: Sequence[EvaluationRow], tasks: Mapping[str, Task]) -> list[EvaluationRow]:
    """Judge the answers with an LLM, and return the evaluation rows, in order, with the verdicts in ``judged``.

    An answer is right if the reward says so (``row.verdict``: mathematical equality, tests passed) or the judge does
    (docs/algorithms/arpo.md, llm_equal). Answers that the reward calls right and missing answers are not sent to
    the judge. Exact match decides nothing here, because it deletes signs ("-5" equals "5"). Other prompt modes and
    infrastructure failures are not judged. If the judge fails, ``judged`` is None and ``judge_failed`` is set.

    Args:
        tasks: by id, of all rows.

    Raises:
        ValueError: the number of verdicts differs from the number of answers.
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
