"""Reads and writes data files; every fault of a file is a DatasetError."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from common.errors import FileError
from common.files import replacing
from common.tables import Unreadable, open_table

SHOWN_ROWS = 5  # of those an error message is about
SHOWN_FAULTS = 8  # kinds of them
ENDINGS = (".jsonl", ".json", ".parquet")  # of files whose rows hold lists and objects
Row = TypeVar("Row")
Item = TypeVar("Item")

_PARTICULARS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+""")  # what a text quotes, and numbers


class DatasetError(FileError):
    """A data file is wrong. The message says which file, which column or rows, and what to do."""


def require_file(path: Path) -> Path:
    """Return ``path`` if the file exists, else raise DatasetError with the most similar file name in its folder."""
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
    """Return the first few row numbers or ids as text, for a message."""
    rest = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return ", ".join(str(row) for row in rows[:SHOWN_ROWS]) + rest


def refuse_rows(path: Path, total: int, rows: Sequence[int], fault: str, advice: str = "") -> None:
    """Raise DatasetError if ``rows`` (the numbers of faulty rows) is not empty. The message names them, counted from 0,
    of ``total``, and ends with ``advice``.
    """
    if rows:
        raise DatasetError(
            f"{path}: {len(rows)} of {total} rows with {fault}: row {shown(rows)} (counted from 0); correct or remove "
            f"them{advice}"
        )


def refuse_faults(path: Path, faults: Sequence[Sequence[str]], advice: str = "") -> None:
    """Raise DatasetError if any row has a fault. The message names the kinds of faults, the most frequent first, with
    the number of rows and the first rows of each.

    Args:
        faults: of each row.
        advice: the end of the message.
    """
    kinds = _kinds(faults)
    if len(kinds) == 1:
        ((fault, rows),) = kinds.items()
        refuse_rows(path, len(faults), rows, fault, advice)
    if kinds:
        raise DatasetError(
            f"{path}: {sum(map(bool, faults))} of {len(faults)} rows are invalid (counted from "
            f"0): {_said(kinds)}; correct or remove them{advice}"
        )


def refuse_lines(path: Path, unit: str, faults: Mapping[int, Sequence[str]], advice: str = "") -> None:
    """Raise DatasetError if any line has a fault. The message names the lines by their faults.

    Args:
        unit: what is counted (from 1), such as line.
        faults: by line.
        advice: the end of the message.
    """
    if said := said_lines(unit, faults):
        raise DatasetError(f"{path}: {len(faults)} {unit}s cannot be used: {said}; correct them{advice}")


def said_lines(unit: str, faults: Mapping[int, Sequence[str]]) -> str:
    """Return the faults with their line numbers as text, for a message; "" without faults."""
    return "; ".join(listed(faults, unit, lambda lines, fault: f"{lines} with {fault}"))


def listed(faults: Mapping[int, Sequence[str]], unit: str, say: Callable[[str, str], str]) -> list[str]:
    """Return one text per fault and its line numbers, worded by the function ``say(lines, fault)``. Lists at most
    SHOWN_ROWS faults of each kind, then counts the others.

    Faults are of one kind if they differ only in numbers and quoted text.

    >>> listed({2: ["id 'a' twice"], 3: ["id 'b' twice", "no text"], 4: ["no text"]}, "line", "{} with {}".format)
    ["line 2 with id 'a' twice", "line 3 with id 'b' twice", 'lines 3-4 with no text']
    """
    kinds: dict[str, dict[str, list[int]]] = {}
    for line, texts in sorted(faults.items()):
        for text in texts:
            kinds.setdefault(_kind_of(text), {}).setdefault(text, []).append(line)
    said: list[str] = []
    for kind in kinds.values():
        for text, lines in list(kind.items())[:SHOWN_ROWS]:
            said.append(say(f"{unit}{'s'[: len(lines) > 1]} {ranges(lines)}", text))
        if rest := sum(len(lines) for lines in list(kind.values())[SHOWN_ROWS:]):
            said.append(say(f"{rest} more {unit}{'s'[: rest > 1]}", "a fault of this kind"))
    return said


def _kind_of(fault: str) -> str:
    return _PARTICULARS.sub("", fault)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text for a message, such as "2-4, 7 and 5 more". Names at most SHOWN_ROWS ranges, and
    counts the other numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown_runs = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:SHOWN_ROWS]]
    rest = sum(last - first + 1 for first, last in runs[SHOWN_ROWS:])
    return ", ".join(shown_runs) + (f" and {rest} more" if rest else "")


def said_faults(faults: Sequence[Sequence[str]]) -> str:
    """Return each kind of fault with its count and first rows as text, for a message; "" without faults."""
    return _said(_kinds(faults))


def _kinds(faults: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the row numbers by kind of fault, the most frequent kind first. The key is the first fault of the kind."""
    first: dict[str, str] = {}
    rows: dict[str, list[int]] = {}
    for row, texts in enumerate(faults):
        for text in texts:
            rows.setdefault(first.setdefault(_kind_of(text), text), []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -len(item[1])))


def _said(kinds: dict[str, list[int]]) -> str:
    texts = [f"{len(rows)} with {fault}: row {shown(rows)}" for fault, rows in list(kinds.items())[:SHOWN_FAULTS]]
    more = len(kinds) - SHOWN_FAULTS
    return "; ".join(texts) + (f"; and {more} other kinds of faults" if more > 0 else "")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a .parquet, .jsonl or .json file as dicts, compressed by gzip or not. A .jsonl file has an
    object per line (empty lines are skipped), a .json file a list of objects. See ``common.tables``.

    Raises:
        DatasetError: no such file, another ending, a file that is not what its ending says, or one without rows.
    """
    with dataset_errors():
        table = open_table(require_file(path), ENDINGS)
        numbered = list(table.rows)
    torn = {number: [row.reason] for number, row in numbered if isinstance(row, Unreadable)}
    if torn:
        said = listed(torn, table.unit, lambda lines, fault: f"{path}, {lines}: not JSON ({fault})")
        raise DatasetError(f"{'; '.join(said)}; write or fetch it again")
    rows = [row for _, row in numbered]
    refuse_rows(path, len(rows), [i for i, row in enumerate(rows) if not isinstance(row, dict)], "no JSON object")
    if not rows:
        raise DatasetError(f"{path}: the file has no rows")
    return rows


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Convert any FileError raised inside the ``with`` block into a DatasetError."""
    try:
        yield
    except FileError as error:
        raise DatasetError(str(error)) from error


def read_each(path: Path, rows: Sequence[Row], read: Callable[[int, Row], Item]) -> list[Item]:
    """Call ``read(number, row)`` for every row, counted from 0, and return the list of results.

    Raises:
        DatasetError: with what ``read`` says of all rows that it refuses.
    """
    found: list[Item] = []
    faults: dict[int, list[str]] = {}
    for number, row in enumerate(rows):
        try:
            found.append(read(number, row))
        except DatasetError as error:
            faults[number] = [str(error).removeprefix(f"{path}, row {number}: ")]
    if faults:
        raise DatasetError("; ".join(listed(faults, "row", lambda lines, fault: f"{path}, {lines}: {fault}")))
    return found


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read a parquet file. Raises DatasetError if it is missing, cut short or not parquet."""
    require_file(path)
    try:
        return pl.read_parquet(path, columns=list(columns) if columns else None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise DatasetError(f"{path} cannot be read as parquet ({error}); write or fetch it again") from error


def write_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Write a parquet file atomically: a killed process leaves the old file or the new one."""
    with replacing(path) as temporary:
        frame.write_parquet(temporary)


def expand(paths: Sequence[str]) -> list[Path]:
    """Return the paths of the given files, with each folder replaced by the parquet files in it, sorted by name.

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
    """Return at most ``limit`` items, evenly spaced over the whole sequence (files are often sorted by data source).

    >>> spread("abcdefgh", 3)
    ['a', 'c', 'f']
    """
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
