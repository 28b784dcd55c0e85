"""Reads files of rows: JSON lines, a JSON list, CSV, TSV or parquet, compressed by gzip or not.

The first bytes of a file decide its format, even if its name differs: a CSV file named ``.jsonl`` is read as CSV.
Rows keep their numbers for messages.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from common.errors import FileError
from common.text import HalfPair, refuse_halves, strict_json

Form = Literal["jsonl", "json", "csv", "parquet"]

ENDINGS = (".tsv", ".csv", ".jsonl", ".json", ".parquet")  # of text files also with .gz
DELIMITERS = ",\t;"
HEAD = 65536  # bytes that decide the format
CHUNK = 100_000  # rows of parquet in memory at once

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # Python's limit is 131,072 characters, less than many pages


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line of a data file that cannot be parsed as a row. ``reason``: for JSON the parser's message."""

    reason: str
    found: bytes = b""  # the start of a line that is not JSON


Rows = Iterator[tuple[int, Any]]  # a row's number from 1, and the row: a JSON value, or Unreadable


@dataclass(frozen=True, slots=True)
class Table:
    """An opened data file and the iterator of its rows. ``unit``: how ``rows`` are numbered, by lines of text (CSV: a
    row's first line) or by rows."""

    unit: Literal["line", "row"]
    form: Form
    rows: Rows


def open_table(
    path: Path,
    endings: Sequence[str] = ENDINGS,
    columns: Callable[[list[str]], list[str]] | None = None,
    parse: Callable[[bytes], Any] = strict_json,
) -> Table:
    """Open a file of rows (JSON lines, JSON, CSV or parquet) and return its ``Table``. Skips blank lines.

    Args:
        endings: accepted endings of file names.
        columns: chooses the columns to read from all column names of a parquet file (None: all).
        parse: parses a line of JSON; raises ValueError.

    Raises:
        FileError: now or while rows are read: another ending, an archive, a file that does not match its first bytes,
            or text that is not UTF-8. The message names the file.
    """
    if not path.name.removesuffix(".gz").endswith(tuple(endings)):
        raise FileError(f"{path} ends in '{path.suffix}'; expected {', '.join(endings[:-1])} or {endings[-1]}")
    form, delimiter = _form(path)
    if form == "parquet":
        return Table("row", form, _parquet(path, columns))
    if form == "json":
        return Table("row", form, _json_list(path))
    return Table("line", form, _guarded(path, _lines(path, parse) if form == "jsonl" else _csv(path, delimiter)))


def _form(path: Path) -> tuple[Form, str]:
    """Return the format of a data file, recognised from its first bytes, and the delimiter if it is CSV."""
    with _opened(path) as file:
        try:
            head = file.read(HEAD)
        except (EOFError, OSError, zlib.error):  # truncated gzip: its rows are read first, then the error is raised
            head = b""
    if head[257:262] == b"ustar":  # such as Search-R1's wiki-18.jsonl.gz, despite its name
        unpack = f"tar -xO{'z' if _zipped(path) else ''}f {path.name} > corpus.jsonl"
        raise FileError(f"{path}: a tar archive; unpack the file in it: {unpack}")
    named = Path(path.name.removesuffix(".gz")).suffix
    if head.startswith(b"PAR1") or named == ".parquet":
        return "parquet", ""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise FileError(f"{path} is not UTF-8 text; write it again as UTF-8")
    lines = [line.strip() for line in head.removeprefix(codecs.BOM_UTF8).splitlines() if line.strip()]
    first = lines[0] if lines else b""
    if first.startswith(b"["):
        return ("jsonl" if named == ".jsonl" and _whole(first) and len(lines) > 1 else "json"), ""
    if first.startswith(b"{"):
        return ("json" if named == ".json" and not (_whole(first) and len(lines) > 1) else "jsonl"), ""
    counts = {delimiter: first.count(delimiter.encode()) for delimiter in DELIMITERS}
    delimiter = "\t" if named == ".tsv" and counts["\t"] else max(counts, key=lambda one: counts[one])
    if named in (".csv", ".tsv") or (counts[delimiter] and not any(line.startswith(b"{") for line in lines)):
        return "csv", delimiter
    return ("json" if named == ".json" else "jsonl"), ""


def _whole(line: bytes) -> bool:
    """Return whether the line is a complete JSON value."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _zipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _opened(path: Path) -> io.BufferedReader:
    if path.suffix == ".gz" or _zipped(path):
        return io.BufferedReader(cast("Any", gzip.open(path)), 2**20)
    return path.open("rb")


def _guarded(path: Path, rows: Rows) -> Rows:
    """Yield the rows of a file; its errors of compression or encoding become a FileError."""
    number = 0
    try:
        for number, row in rows:
            yield number, row
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} cannot be read in UTF-8 after line {number} ({error}); write it again as UTF-8"
        ) from error
    except csv.Error as error:
        raise FileError(f"{path} cannot be read as CSV after line {number} ({error}); write it again") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileError(
            f"{path}: not gzip, or truncated, after line {number} ({error}); download it again, or drop .gz from its "
            "name if it is plain text"
        ) from error


def _lines(path: Path, parse: Callable[[bytes], Any]) -> Rows:
    with _opened(path) as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                row = parse(line)
            except (ValueError, RecursionError) as error:
                if not line.strip():
                    continue
                row = Unreadable(_reason(error), line[:80])
            yield number, row


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the line is not UTF-8: {error}"
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _csv(path: Path, delimiter: str) -> Rows:
    # Not polars, which does not report a row's line: a quoted field may contain line breaks.
    with _opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(reader, [])
        before = reader.line_num
        for values in reader:
            line, before = before + 1, reader.line_num
            if values and len(values) != len(header):
                yield line, Unreadable(f"{len(values)} fields, expected the {len(header)} of the first line")
            elif values:
                yield line, {name: value or None for name, value in zip(header, values, strict=True)}


def _json_list(path: Path) -> Rows:
    try:
        with _opened(path) as file:
            text = file.read().decode("utf-8-sig")
            rows = json.loads(text)
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text ({error}); write or download it again") from error
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise FileError(f"{path} cannot be read as JSON ({error}); write or download it again") from error
    if not isinstance(rows, list):
        raise FileError(f"{path} is a JSON {type(rows).__name__}; expected a list of objects")
    escaped = "\\u" in text
    for number, row in enumerate(rows, start=1):
        try:
            if escaped:
                refuse_halves(row)
        except HalfPair as error:
            row = Unreadable(str(error))
        yield number, row


def _parquet(path: Path, columns: Callable[[list[str]], list[str]] | None) -> Rows:
    import polars as pl

    try:
        frame = pl.scan_parquet(path)
        names = frame.collect_schema().names()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise FileError(
            f"{path} cannot be read as parquet: not a parquet file ({error}); write or download it again"
        ) from error
    chosen = frame.select(names if columns is None else columns(names))
    for start in range(0, sys.maxsize, CHUNK):
        try:
            rows = chosen.slice(start, CHUNK).collect()
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise FileError(f"{path} is damaged after row {start} ({error}); write or download it again") from error
        if not len(rows):
            return
        yield from enumerate(rows.iter_rows(named=True), start=start + 1)
