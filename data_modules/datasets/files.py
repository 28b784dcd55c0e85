"""Reads and writes data files; every fault of a file is a DatasetError."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from retrieval.types import FileError
from rollout.files import replacing

SHOWN_ROWS = 5  # of those an error message is about
SHOWN_FAULTS = 8  # kinds of them


class DatasetError(FileError):
    """A data file is not what it should be. The message says which file, which column or rows, and what to do."""


def require_file(path: Path) -> Path:
    """Raises DatasetError with the nearest name in the same folder when there is no such file."""
    if path.is_file():
        return path
    if path.is_dir():
        raise DatasetError(f"{path} is a folder, expected a file")
    suffix = path.suffix or ".parquet"
    names = sorted(p.name for p in path.parent.glob(f"*{suffix}")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    found = ", ".join(names[:8]) or f"no {suffix[1:]} file"
    hint = f"; did you mean '{near[0]}'?" if near else f"; the folder has: {found}"
    raise DatasetError(f"no such file: {path}{hint}")


def shown(rows: Sequence[int | str]) -> str:
    """The first few numbers or ids, for a message."""
    rest = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return ", ".join(str(row) for row in rows[:SHOWN_ROWS]) + rest


def refuse_rows(path: Path, total: int, rows: Sequence[int], fault: str, advice: str = "") -> None:
    """Raises DatasetError, naming ``rows`` (counted from 0, of ``total``), if there are any; ``advice`` ends it."""
    if rows:
        raise DatasetError(
            f"{path}: {len(rows)} of {total} rows with {fault}: row {shown(rows)} (counted from 0); correct or remove "
            f"them{advice}"
        )


def refuse_faults(path: Path, faults: Sequence[str | None], advice: str = "") -> None:
    """Raises DatasetError, with the kinds of faults among all rows (None: the row is as it should be), how many rows
    have each and which come first; the most frequent kinds first, SHOWN_FAULTS of them. ``advice`` ends the message."""
    kinds = _kinds(faults)
    if len(kinds) == 1:
        ((fault, rows),) = kinds.items()
        refuse_rows(path, len(faults), rows, fault, advice)
    if kinds:
        raise DatasetError(
            f"{path}: {sum(map(len, kinds.values()))} of {len(faults)} rows are not as they should be (counted from "
            f"0): {_said(kinds)}; correct or remove them{advice}"
        )


def refuse_lines(path: Path, unit: str, faults: Mapping[int, str], advice: str = "") -> None:
    """Raises DatasetError with every faulty line (or other ``unit``, counted from 1), by what is wrong, if there are
    any; ``advice`` ends the message."""
    kinds: dict[str, list[int]] = {}
    for line, fault in sorted(faults.items()):
        kinds.setdefault(fault, []).append(line)
    said = [f"{unit}{'s' if len(lines) > 1 else ''} {ranges(lines)} with {fault}" for fault, lines in kinds.items()]
    if said:
        raise DatasetError(f"{path}: {len(faults)} {unit}s cannot be used: {'; '.join(said)}; correct them{advice}")


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, for a message.

    >>> ranges([2, 4, 5, 6, 9])
    '2, 4-6, 9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def said_faults(faults: Sequence[str | None]) -> str:
    """The kinds of faults with their counts and first rows, for a message; "" where there are none."""
    return _said(_kinds(faults))


def _kinds(faults: Sequence[str | None]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, fault in enumerate(faults):
        if fault is not None:
            rows.setdefault(fault, []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -len(item[1])))


def _said(kinds: dict[str, list[int]]) -> str:
    texts = [f"{len(rows)} with {fault}: row {shown(rows)}" for fault, rows in list(kinds.items())[:SHOWN_FAULTS]]
    more = len(kinds) - SHOWN_FAULTS
    return "; ".join(texts) + (f"; and {more} other kinds of faults" if more > 0 else "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, .jsonl (an object per line; empty lines are skipped) or .json file (a list of objects).

    Raises:
        DatasetError: no such file, another ending, a file that is not what its ending says, or one without rows.
    """
    require_file(path)
    if path.suffix == ".parquet":
        rows = read_parquet(path).to_dicts()
    elif path.suffix in (".json", ".jsonl"):
        rows = _read_json(path)
    else:
        raise DatasetError(f"{path} ends in '{path.suffix}'; expected .jsonl, .json or .parquet")
    refuse_rows(path, len(rows), [i for i, row in enumerate(rows) if not isinstance(row, dict)], "no JSON object")
    if not rows:
        raise DatasetError(f"{path}: the file has no rows")
    return rows


def _read_json(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without the byte order mark
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text ({error}); write or fetch it again") from error
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read as JSON ({error}); write or fetch it again") from error
        if not isinstance(rows, list):
            raise DatasetError(f"{path} holds a JSON {type(rows).__name__}, expected a list of objects")
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise DatasetError(f"{path}, line {number}: not JSON ({error}); write or fetch it again") from error
    return rows


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Raises DatasetError when the file is missing, cut short or not parquet."""
    require_file(path)
    try:
        return pl.read_parquet(path, columns=list(columns) if columns else None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise DatasetError(f"{path} cannot be read as parquet ({error}); write or fetch it again") from error


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Written beside the target and renamed: a kill leaves the old file or the new one, never half of one."""
    with replacing(path) as temporary:
        frame.write_parquet(temporary)


def expand(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders as the parquet files in them by name.

    Raises:
        DatasetError: nothing given, no such file, or a folder without parquet files.
    """
    if not paths:
        raise DatasetError("no file given; expected at least one parquet file, or a folder of them")
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
            if not inside:
                raise DatasetError(f"folder {path} holds no parquet file")
            files += inside
        else:
            files.append(require_file(path))
    return files


def spread(items: Sequence[Any], limit: int | None) -> list[Any]:
    """At most ``limit`` items, evenly spaced over the whole (files are often sorted by data source).

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
