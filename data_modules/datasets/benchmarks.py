"""Readers for the evaluation sets of ARPO (specs/arpo.md section 7), in their published field names.

=====================================================================  =============  =================================
set                                                                    question       answer
=====================================================================  =============  =================================
aime24, math500                                                        question       string or number
gsm8k                                                                  question       a solution; what follows "####"
aime25, math                                                           problem        string or number
webwalker, hotpotqa, 2wiki, bamboogle, musique, hle, simpleqa, xbench  question       string, list, or list as JSON text
gaia                                                                   Question       the same
=====================================================================  =============  =================================

Files are .jsonl, .json (a list) or .parquet. Several hosts publish the same sets under another of these names for the
question: where the set's own is missing, the others are looked for.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_modules.datasets.files import DatasetError, read_rows, refuse_rows
from data_modules.datasets.references import BENCHMARKS
from data_modules.loaders import spread
from rollout.rewards.arpo import MATH_SOURCES
from rollout.trajectory import Task

QUESTION_FIELDS = ("question", "problem", "Question")
ANSWER_FIELDS = ("answer",)
SOLUTION_MARKER = "####"  # gsm8k: the answer is what follows it
# Reported beside the figures, where a set has them: GAIA's difficulty, MATH's level and subject.
DETAILS = {"level": "level", "Level": "level", "subject": "subject"}


def load_benchmark(name: str, path: str | Path, limit: int | None = None) -> list[Task]:
    """Tasks with data source ``name``, ids ``<name>_<row>`` and metadata ability ("math" or "qa"), benchmark, and,
    where the file has them, level and subject.

    Args:
        name: one of ``references.BENCHMARKS``.
        limit: at most so many, evenly spaced over the file.

    Raises:
        DatasetError: unknown name, no such file, a file that cannot be read, a column that is missing, or rows whose
            question or answer is not what the module's table says.
    """
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(BENCHMARKS)}"
        raise DatasetError(f"no evaluation set is called '{name}'{hint}")
    path, ability = Path(path), "math" if name in MATH_SOURCES else "qa"
    rows = read_rows(path)
    questions = _questions(path, rows, _column(path, rows, "question", (BENCHMARKS[name], *QUESTION_FIELDS)))
    answers = _answers(path, rows, _column(path, rows, "answer", ANSWER_FIELDS), name, ability)
    tasks = []
    for number, (row, question, golds) in enumerate(zip(rows, questions, answers, strict=True)):
        details = {ours: row[field] for field, ours in DETAILS.items() if isinstance(row.get(field), (str, int))}
        metadata = {"ability": ability, "benchmark": name, **details}
        tasks.append(Task(f"{name}_{number}", question, golds, name, metadata=metadata))
    return spread(tasks, limit)


def _column(path: Path, rows: Sequence[dict[str, Any]], what: str, fields: Sequence[str]) -> str:
    """The first of ``fields`` that any row has."""
    found = list(dict.fromkeys(field for row in rows for field in row))
    for field in fields:
        if field in found:
            return field
    names = " or ".join(f"'{field}'" for field in dict.fromkeys(fields))
    raise DatasetError(f"{path}: no column {names} for the {what}. The file has: {', '.join(found)}")


def _questions(path: Path, rows: Sequence[dict[str, Any]], column: str) -> list[str]:
    values = [row.get(column) for row in rows]
    wrong = [i for i, value in enumerate(values) if not isinstance(value, str) or not value.strip()]
    refuse_rows(path, len(rows), wrong, f"no text in column '{column}' (the question)")
    return [value.strip() for value in values]


def _answers(
    path: Path, rows: Sequence[dict[str, Any]], column: str, name: str, ability: str
) -> list[tuple[str, ...]]:
    values = [row.get(column) for row in rows]
    if name == "gsm8k":
        wrong = [i for i, value in enumerate(values) if not isinstance(value, str) or SOLUTION_MARKER not in value]
        refuse_rows(path, len(rows), wrong, f"no '{SOLUTION_MARKER}' before the answer in column '{column}'")
        values = [value.rpartition(SOLUTION_MARKER)[2] for value in values]
    answers = [_golds(value, ability) for value in values]
    wrong = [i for i, golds in enumerate(answers) if not golds]
    refuse_rows(path, len(rows), wrong, f"no gold answer in column '{column}' (expected text, a number or a list)")
    return answers


def _golds(value: Any, ability: str) -> tuple[str, ...]:
    """Gold answers of one row, stripped; () where the value is none, or holds something else than texts and numbers."""
    if isinstance(value, str) and ability == "qa" and value.strip().startswith("["):
        # Not in mathematics, where "[1, 2]" is an interval.
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            pass  # a text that begins with a bracket
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values):
        return ()
    texts = (str(v).strip() for v in values)
    return tuple(text for text in texts if text)
