"""Reads question files of your own shape: CSV, JSON lines, JSON or parquet, with a mapping of columns.

They become rows in the columns that ``questions.py`` documents: renamed, one gold answer as a list of one, ids and the
data source from the file's name where there are none. Every row keeps its line, so that a message can name it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_modules.datasets.files import DatasetError, read_parquet, require_file

MAPPED = ("id", "question", "golden_answers", "data_source", "ability", "hint", "metadata", "prompt", "gold_passages")
READ = (".csv", ".jsonl", ".json", ".parquet")


@dataclass(slots=True)
class OwnRows:
    """``rows`` in our columns, and the line of each; ``unreadable``: by line, why it holds no row. ``unit``: what lines
    are, counted from 1: lines of a text, rows of a parquet file. ``given``: the file's own columns."""

    unit: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_own(path: Path, columns: Mapping[str, str]) -> OwnRows:
    """All rows of a file.

    Args:
        columns: of ``MAPPED``, the file's own names.

    Raises:
        DatasetError: no such file, another ending, no rows, a mapping to a column that is not there, or text that is
            not UTF-8.
    """
    if unknown := sorted(set(columns) - set(MAPPED)):
        raise DatasetError(f"columns.{unknown[0]} is no column of ours; expected {', '.join(MAPPED)}")
    require_file(path)
    if path.suffix not in READ:
        raise DatasetError(f"{path} ends in '{path.suffix}'; expected {', '.join(READ)}")
    found = OwnRows("line" if path.suffix in (".csv", ".jsonl") else "row")
    try:
        for line, row in _read(path):
            if isinstance(row, dict):
                found.rows.append(row)
                found.lines.append(line)
            else:
                found.unreadable[line] = row
    except DatasetError:
        raise
    except (ValueError, RecursionError, csv.Error) as error:
        raise DatasetError(f"{path} cannot be read as {path.suffix[1:]} in UTF-8 ({error}); write it again") from error
    if not found.rows and not found.unreadable:
        raise DatasetError(f"{path}: the file has no rows")
    there = found.given = found.columns
    for ours, theirs in columns.items():
        if found.rows and theirs not in there:
            raise DatasetError(f"{path}: no column '{theirs}' (columns.{ours}); the file has: {', '.join(there)}")
    pairs = zip(found.rows, found.lines, strict=True)
    name = path.stem.encode(errors="backslashreplace").decode()  # a file's name may have bytes that are no text
    found.rows = [_ours(row, columns, f"{name}_{line}", name, there) for row, line in pairs]
    return found


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line and row, or line and what is wrong with it."""
    if path.suffix == ".parquet":
        yield from enumerate(read_parquet(path).to_dicts(), start=1)
    elif path.suffix == ".csv":
        yield from _read_csv(path)
    elif path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(rows, list):
            raise DatasetError(f"{path} holds a JSON {type(rows).__name__}, expected a list of objects")
        yield from ((i, row if isinstance(row, dict) else "no JSON object") for i, row in enumerate(rows, start=1))
    else:
        with path.open(encoding="utf-8-sig") as file:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _json_row(text)


def _json_row(text: str) -> dict[str, Any] | str:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return f"no JSON ({getattr(error, 'msg', error)}{at})"
    return row if isinstance(row, dict) else "no JSON object"


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    # Not polars, which does not say on which line a row begins: a quoted field may hold line breaks.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        before = reader.line_num
        for values in reader:
            line, before = before + 1, reader.line_num
            if values and len(values) != len(header):
                yield line, f"{len(values)} fields, expected the {len(header)} of the first line"
            elif values:
                yield line, {name: value or None for name, value in zip(header, values, strict=True)}


def _ours(
    row: dict[str, Any], columns: Mapping[str, str], identity: str, source: str, there: list[str]
) -> dict[str, Any]:
    """The row in our columns. A name is mapped away even where it is one of ours; what all rows lack is made."""
    taken = set(columns.values()) | set(columns)
    out = {name: row.get(name) for name in there if name not in taken}
    out |= {ours: row.get(theirs) for ours, theirs in columns.items()}
    if "golden_answers" in out:
        out["golden_answers"] = _answers(out["golden_answers"])
    out.setdefault("data_source", source)
    out.setdefault("id", identity)
    return out


def _answers(value: Any) -> Any:
    """Gold answers as a list of texts, where they are a text, a number, a list of them, or such a list as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    return [str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v for v in values]
