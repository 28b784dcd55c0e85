"""Reads question files of your own shape (CSV, TSV, JSON lines, JSON or parquet), with a mapping of columns.

Rows get the columns that ``questions.py`` documents: columns are renamed, one gold answer becomes a list, and missing
ids and data sources come from the file's name. Every row keeps its line for messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.tables import Unreadable, open_table
from data_modules.datasets.files import DatasetError, dataset_errors, require_file
from data_modules.datasets.ground_truths import as_answers

MAPPED = ("id", "question", "golden_answers", "data_source", "ability", "hint", "metadata", "prompt", "gold_passages")


@dataclass(slots=True)
class OwnRows:
    """The rows of a user's question file, renamed to our columns, each with its line number. ``unreadable`` maps the
    number of each line that could not be read to the reason. ``unit`` names what the numbers count from 1 (see
    ``Table``), and ``given`` lists the file's own columns.
    """

    unit: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    unreadable: dict[int, list[str]] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_own(path: Path, columns: Mapping[str, str]) -> OwnRows:
    """Read all rows of a user's question file and rename their columns to ours.

    Args:
        columns: of ``MAPPED``, the file's own names.

    Raises:
        DatasetError: no such file, another ending, no rows, a mapping to a column that is not there, or text that is
            not UTF-8.
    """
    if unknown := sorted(set(columns) - set(MAPPED)):
        raise DatasetError(f"columns.{unknown[0]} is not a known column; expected {', '.join(MAPPED)}")
    with dataset_errors():
        table = open_table(require_file(path))
        found = OwnRows(table.unit)
        for line, row in table.rows:
            if isinstance(row, dict):
                found.rows.append(row)
                found.lines.append(line)
            else:
                found.unreadable[line] = [_unreadable(row)]
    if not found.rows and not found.unreadable:
        raise DatasetError(f"{path}: the file has no rows")
    there = found.given = found.columns
    for ours, theirs in columns.items():
        if found.rows and theirs not in there:
            raise DatasetError(f"{path}: no column '{theirs}' (columns.{ours}); the file has: {', '.join(there)}")
    pairs = zip(found.rows, found.lines, strict=True)
    name = path.stem.encode(errors="backslashreplace").decode()  # a file's name may have undecodable bytes
    found.rows = [_ours(row, columns, f"{name}_{line}", name, there) for row, line in pairs]
    return found


def _unreadable(row: Any) -> str:
    if not isinstance(row, Unreadable):
        return "no JSON object"
    return f"no JSON ({row.reason})" if row.found else row.reason


def _ours(
    row: dict[str, Any], columns: Mapping[str, str], identity: str, source: str, there: list[str]
) -> dict[str, Any]:
    """Return a row of a user's file with our column names. A mapped column is removed under its old name; missing
    columns are added.
    """
    taken = set(columns.values()) | set(columns)
    out = {name: row.get(name) for name in there if name not in taken}
    out |= {ours: row.get(theirs) for ours, theirs in columns.items()}
    if "golden_answers" in out:
        out["golden_answers"] = _answers(out["golden_answers"])
    out.setdefault("data_source", source)
    out.setdefault("id", identity)
    return out


def _answers(value: Any) -> Any:
    """Return gold answers as a list of texts, parsed first if they are JSON text. Text of two numbers is one answer, an
    interval. Other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
        numbers = [one for one in parsed if isinstance(one, (int, float)) and not isinstance(one, bool)]
        value = [value] if len(numbers) == len(parsed) == 2 else parsed
    answers = as_answers(value)
    return value if answers is None else list(answers)
