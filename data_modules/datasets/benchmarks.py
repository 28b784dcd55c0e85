"""Reads the evaluation sets of ARPO and SOD.

=====================================================================  =============  =================================
set                                                                    question       answer
=====================================================================  =============  =================================
aime24, math500                                                        question       string or number
gsm8k                                                                  question       a solution; what follows "####"
aime25, math                                                           problem        string or number
webwalker, hotpotqa, 2wiki, bamboogle, musique, hle, simpleqa, xbench  question       string, list, or list as JSON text
gaia                                                                   Question       the same
gpqa_diamond                                                           problem        solution: the letter of an option
livecodebench_v6                                                       see livecodebench.py: tests instead of an answer
=====================================================================  =============  =================================

Files are .jsonl, .json (a list) or .parquet. Several hosts publish the same sets under another of these names (AIME
2024 is {Problem, Answer} in SOD's file), and SimpleQA's rows have question or problem: where the set's own is missing,
the others are used. FlashRAG's files (golden_answers, and paragraphs in metadata) are read, too: the supporting
paragraphs become gold passages.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.text import strict_json
from data_modules.datasets.benchmark_names import BENCHMARKS
from data_modules.datasets.files import DatasetError, read_rows, refuse_rows, spread
from data_modules.datasets.gold_paragraphs import NOT_THERE, NoParagraphs, Passages, gold_paragraphs
from data_modules.datasets.ground_truths import as_answers, read_letter
from data_modules.datasets.livecodebench import read_problems
from rollout.rewards.arpo import MATH_SOURCES
from rollout.trajectory import Task

logger = logging.getLogger(__name__)

CODE_SETS, CHOICE_SETS = ("livecodebench_v6",), ("gpqa_diamond",)
QUESTION_FIELDS = ("question", "problem", "Question", "Problem")
ANSWER_FIELDS = ("answer", "Answer", "golden_answers")
LETTER_FIELDS = ("solution", *ANSWER_FIELDS)
SOLUTION_MARKER = "####"  # gsm8k: the answer is what follows it
# Reported beside the metrics, where a set has them: GAIA's and LiveCodeBench's difficulty, MATH's level and subject,
# GPQA's domain. A hint is for the teacher of self-distillation.
DETAILS = {
    "level": "level", "Level": "level", "subject": "subject", "domain": "domain", "difficulty": "difficulty",
    "hint": "hint",
}  # fmt: skip


def load_benchmark(name: str, path: str | Path, limit: int | None = None) -> list[Task]:
    """Read the file of a published evaluation set into tasks. Their data source is ``name``, their ids
    ``<name>_<row>``. Metadata holds ability ("math", "qa", "choice" or "code"), benchmark and what the file has of
    ``DETAILS``. Programs have tests and starter_code instead of a gold answer.

    Args:
        name: one of ``references.BENCHMARKS``.
        limit: at most so many, evenly spaced over the file.

    Raises:
        DatasetError: unknown name, no such file, a file that cannot be read, a column that is missing, or rows whose
            question, answer or tests are not what the module's table says.
    """
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(BENCHMARKS)}"
        raise DatasetError(f"no evaluation set is called '{name}'{hint}")
    path, ability = Path(path), ability_of_benchmark(name)
    rows = read_rows(path)
    answers: list[tuple[str, ...]] = [()] * len(rows)
    particulars: list[dict[str, Any]] = [{} for _ in rows]
    if ability == "code":
        problems = read_problems(path, rows)
        questions = [problem.question for problem in problems]
        particulars = [{"tests": problem.tests, "starter_code": problem.starter_code} for problem in problems]
    else:
        questions = _questions(path, rows, (BENCHMARKS[name], *QUESTION_FIELDS))
        fields = LETTER_FIELDS if ability == "choice" else ANSWER_FIELDS
        answers = _answers(path, rows, _column(path, rows, "answer", fields), name, ability)
    passages = _gold_passages(path, rows)
    tasks = []
    for number, (row, question, golds, own) in enumerate(zip(rows, questions, answers, particulars, strict=True)):
        details = {ours: row[field] for field, ours in DETAILS.items() if isinstance(row.get(field), (str, int))}
        metadata = {"ability": ability, "benchmark": name, **details, **own}
        tasks.append(Task(f"{name}_{number}", question, golds, name, passages[number], metadata))
    return spread(tasks, limit)


def ability_of_benchmark(name: str) -> str:
    if name in MATH_SOURCES:
        return "math"
    return "code" if name in CODE_SETS else "choice" if name in CHOICE_SETS else "qa"


def _column(path: Path, rows: Sequence[dict[str, Any]], what: str, fields: Sequence[str]) -> str:
    """Return the first name in ``fields`` that is a column of any row, or raise DatasetError."""
    found = list(dict.fromkeys(field for row in rows for field in row))
    for field in fields:
        if field in found:
            return field
    names = " or ".join(f"'{field}'" for field in dict.fromkeys(fields))
    raise DatasetError(f"{path}: no column {names} for the {what}. The file has: {', '.join(found)}")


def _questions(path: Path, rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> list[str]:
    """Return the question text of each row, from the first of ``fields`` with a value. SimpleQA's rows differ in
    this."""
    column = _column(path, rows, "question", fields)
    values = [next((row[field] for field in fields if row.get(field) is not None), None) for row in rows]
    texts = [value.strip() if isinstance(value, str) else "" for value in values]
    wrong = [i for i, text in enumerate(texts) if not text]
    refuse_rows(path, len(rows), wrong, f"no text in column '{column}' (the question)")
    return texts


def _gold_passages(path: Path, rows: Sequence[dict[str, Any]]) -> list[Passages]:
    """Return the gold passages of each row: the supporting paragraphs in its metadata (HotpotQA, 2Wiki, MuSiQue). A row
    without them has ().
    """
    found: list[Passages] = []
    incomplete = 0
    for row in rows:
        try:
            found.append(gold_paragraphs(row.get("metadata")))
        except NoParagraphs:
            incomplete += 1
            found.append(())
    if incomplete:
        logger.warning("%s: %d rows name %s; they have no gold passages", path, incomplete, NOT_THERE)
    return found


def _answers(path: Path, rows: Sequence[dict[str, Any]], column: str, name: str, ability: str) -> list[tuple[str, ...]]:
    values = [row.get(column) for row in rows]
    if name == "gsm8k":
        wrong = [i for i, value in enumerate(values) if not isinstance(value, str) or SOLUTION_MARKER not in value]
        refuse_rows(path, len(rows), wrong, f"no '{SOLUTION_MARKER}' before the answer in column '{column}'")
        values = [str(value).rpartition(SOLUTION_MARKER)[2] for value in values]
    if ability == "choice":
        letters = [read_letter(value) for value in values]
        wrong = [i for i, letter in enumerate(letters) if letter is None]
        refuse_rows(path, len(rows), wrong, f"no letter of an option in column '{column}'")
        return [(letter,) for letter in letters if letter is not None]
    answers = [_golds(value, ability) for value in values]
    wrong = [i for i, golds in enumerate(answers) if not golds]
    refuse_rows(path, len(rows), wrong, f"no gold answer in column '{column}' (expected text, a number or a list)")
    return answers


def _golds(value: Any, ability: str) -> tuple[str, ...]:
    """Return the gold answers of one row as stripped texts; () if the value is neither text, number nor list."""
    if isinstance(value, str) and ability == "qa" and value.strip().startswith("["):
        # Not in mathematics, where "[1, 2]" is an interval.
        try:
            value = strict_json(value)
        except (ValueError, RecursionError):
            pass  # a text that begins with a bracket
    return tuple(text.strip() for text in as_answers(value) or ())
