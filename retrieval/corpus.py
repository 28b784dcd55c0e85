"""Reads corpus files and stores their passages, validated, for random access.

A corpus is a file of JSON lines, CSV or TSV (each compressed by gzip or not), of a JSON list, or of parquet: see
``tables.py``. Its first usable row decides the form of all rows: Search-R1's ``{"id": "7", "contents":
"\\"Title\\"\\ntext"}``, Pyserini's ``{id, contents}`` without titles (MS MARCO), or ``{_id, title, text}`` (BEIR); ids
may be called ``id``, ``_id`` or ``docid``. ``columns`` names other columns. The store is a copy of the corpus in each
index folder: JSON lines in parts (Lucene's indexer reads these files as they are) and an array of
byte offsets. It is read through memory maps, so that a server with 21 million passages starts at once and needs no
memory for them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import shutil
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import orjson

from common.errors import FileError, one_line
from common.tables import Unreadable, open_table
from retrieval.types import CorpusError, Document, IndexFolderError, split_contents

PART_SIZE = 500_000  # passages per part: Lucene's indexer uses one thread per file
_ROW_DIGITS = 10  # rows are zero-padded, because Lucene breaks ties by id: ties come in corpus order
OWN = ("id", "title", "text", "contents")  # the columns of a corpus of your own shape
IDS = ("id", "_id", "docid")  # names of the id in corpora without ``columns``
SHOWN = 3  # number of messages about malformed rows
_FORMS = '{"id": "7", "contents": "\\"Title\\"\\nText"} or {"id": "7", "title": "Title", "text": "Text"}'


class Passage(NamedTuple):
    id: str
    contents: str


class RowError(CorpusError):
    """A row of a corpus file cannot be used. ``fault``: the message without file and line."""

    def __init__(self, path: Path, unit: str, number: int, fault: str) -> None:
        super().__init__(f"{path}, {unit} {number}: {fault}")
        self.unit, self.fault = unit, fault


class StoreSummary(NamedTuple):
    passages: int
    sha256: str  # of the corpus file's bytes
    skipped: int = 0  # malformed rows that were left out


@dataclass
class Malformed:
    """Counts the malformed rows that ``read_corpus`` left out, and keeps the first messages."""

    rows: int = 0
    first: list[str] = field(default_factory=list)  # messages of the first rows

    def add(self, fault: CorpusError) -> None:
        self.rows += 1
        if len(self.first) < SHOWN:
            self.first.append(str(fault))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex text. Reads the file in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_description(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that describes an index or its vectors, with the SHA-256 of its values, atomically."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w") as file:
        json.dump({**values, "sha256": _values_sha256(values)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_description(path: Path, *needed: str) -> dict[str, Any]:
    """Return the values of a JSON file of ``write_description``, or of an earlier version without the SHA-256.

    Raises:
        IndexFolderError: the file is not a description, was altered, or lacks a ``needed`` key.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        own = values.pop("sha256", None)
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"no '{missing[0]}'")
        if own not in (None, _values_sha256(values)):
            raise ValueError("it was altered")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise IndexFolderError(f"{path}: not an index description ({one_line(error)}); build it again") from error
    return values


def _values_sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def require_corpus(corpus: str | Path) -> Path:
    """Return the corpus file's path. Raises CorpusError if the file is missing."""
    path = Path(corpus)
    if not path.is_file():
        raise CorpusError(
            f"corpus {path}: no such file; give a .jsonl, .jsonl.gz, .csv or .parquet file of passages, {_FORMS}"
        )
    return path


def read_corpus(
    path: Path, columns: Mapping[str, str] | None = None, malformed: Malformed | None = None
) -> Iterator[Passage]:
    """Yield the passages of a corpus file, in order. Prints the recognised form to stderr.

    Args:
        columns: for your own corpus, the file's names of ``id``, ``title`` and ``text`` (or ``contents``); {} if it
            uses these names. A missing id becomes the row's number, a missing title the id. None: the first usable row
            decides, see the module's docstring.
        malformed: counts the unusable rows, which are skipped.

    Raises:
        CorpusError: at the first unusable row, without ``malformed``.
    """
    for _, found in passages(path, columns, lambda form: print(f"{path}: read as {form}", file=sys.stderr, flush=True)):
        if isinstance(found, Passage):
            yield found
        elif malformed is None:
            raise CorpusError(f"{found}; repair the row, or skip such rows (skip_malformed: true)")
        else:
            malformed.add(found)


def passages(
    path: Path, columns: Mapping[str, str] | None = None, say: Callable[[str], None] | None = None
) -> Iterator[tuple[int, Passage | RowError]]:
    """Yield (number, passage) for each line of a corpus file (parquet: row), numbers from 1. An unusable line yields
    its error instead. See ``read_corpus``.

    Skips blank lines. ``say`` receives a description of the recognised form.

    Raises:
        CorpusError: the file does not match its ending, or lacks a needed column.
    """
    try:
        yield from _passages(path, columns, say)
    except FileError as error:
        raise CorpusError(str(error)) from error


def _passages(
    path: Path, columns: Mapping[str, str] | None, say: Callable[[str], None] | None
) -> Iterator[tuple[int, Passage | RowError]]:
    if unknown := sorted(set(columns or {}) - set(OWN)):
        raise CorpusError(f"columns.{unknown[0]} is not a column of a corpus; expected {', '.join(OWN)}")
    seen = _SeenIds()
    table = open_table(path, columns=partial(_parquet_columns, path, columns), parse=orjson.loads)
    mapped = {theirs: ours for ours, theirs in (columns or {}).items()}
    found: list[str] = []  # columns of the last line, while a mapped column has not appeared
    form = None if columns is None else _SEARCH_R1
    for row, (number, record) in enumerate(table.rows, start=1):
        try:
            if isinstance(record, Unreadable):
                raise CorpusError(_unreadable(record))
            if columns is not None:
                if mapped and isinstance(record, dict):
                    found = list(record)
                    mapped = {theirs: ours for theirs, ours in mapped.items() if theirs not in record}
                record = _ours(record, columns, row)
            if form:
                passage = form.read(record, row)
            else:
                recognised = _recognise(record)
                passage = recognised.read(record, row)
                form = recognised
                if say:
                    say(form.described())
            first = seen.add(passage.id, row)
            if first is not None:
                at = f"{table.unit} {first}" if number == row else f"passage {first} (blank lines do not count)"
                raise CorpusError(
                    f"id {passage.id!r} was already used in {at}; ids must be unique: "
                    "renumber the passages or remove one of them"
                )
            yield number, passage
        except CorpusError as fault:
            yield number, RowError(path, table.unit, number, str(fault))
    for theirs, ours in mapped.items() if found else ():
        raise CorpusError(f"{path}: no line has '{theirs}' (columns.{ours}); they have {', '.join(found)}")


def _unreadable(line: Unreadable) -> str:
    return f"not JSON ({line.reason}); found {line.found!r}, expected {_FORMS}" if line.found else line.reason


class _Form(NamedTuple):
    """The columns and title form of a corpus file's rows. The first usable row decides them for the whole file."""

    id: str | None  # name of the id column, or None: rows are numbered from 0
    text: str  # name of the text column, ``contents`` or ``text``
    title_line: bool  # ``contents`` begin with a title line; otherwise the ``title`` or the id becomes one
    titled: bool = False  # the first row has a ``title``

    def __str__(self) -> str:
        return f"{{{', '.join(filter(None, (self.id, 'title' if self.titled else '', self.text)))}}}"

    def described(self) -> str:
        title = "the first line is the title" if self.title_line else "the id replaces a missing title"
        return f"{self}; {title}" + ("" if self.id else "; ids are the passages' numbers from 0")

    def read(self, record: object, row: int) -> Passage:
        """Return the passage in a row of a corpus file. ``row``: its number from 1."""
        if not isinstance(record, dict):
            raise CorpusError(f"found {type(record).__name__}, expected {_FORMS}")
        if self.id is not None:
            id_ = record.get(self.id)
        elif others := [name for name in IDS if name in record]:
            raise CorpusError(f"found an {others[0]!r}, but the first passage of the file has none; give all or none")
        else:
            id_ = row - 1
        contents: Any = record.get(self.text)
        if faults := list(self._faults(record, id_, contents)):
            raise CorpusError("; ".join(faults))
        if self.title_line:
            return Passage(str(id_), contents)
        return Passage(str(id_), _with_title(record.get("title"), id_, contents))

    def _faults(self, record: dict[str, Any], id_: Any, contents: Any) -> Iterator[str]:
        missing = [repr(name) for name, value in ((self.id, id_), (self.text, contents)) if value is None]
        if missing:
            yield f"no {' and no '.join(missing)}; found the keys {sorted(record)}, expected {self}"
        if isinstance(id_, bool) or not isinstance(id_, (str, int, NoneType)) or id_ == "":
            yield f"{self.id} is {id_!r}; expected a text or a whole number"
        if contents is None:
            return
        if not isinstance(contents, str):
            yield f"{self.text} is {type(contents).__name__}; expected a text"
        elif self.title_line:
            title, line_break, text = contents.partition("\n")
            if not line_break or not title.strip() or not text.strip():
                yield f'contents {contents[:80]!r} is not a title line followed by text ("Title"\\ntext)'
        elif not contents.strip():
            yield f"{self.text} is {contents!r:.80}; expected the text of a passage"
        elif self.text == "contents" and "\n" in contents:
            yield (
                f"contents {contents[:80]!r} has a line break, as after a title line, but the file's first passage has "
                "none; give all passages a title line, or say columns.text contents if none has one"
            )


_SEARCH_R1 = _Form("id", "contents", title_line=True)


def _recognise(record: object) -> _Form:
    if not isinstance(record, dict):
        raise CorpusError(f"found {type(record).__name__}, expected {_FORMS}")
    text = next((name for name in ("contents", "text") if record.get(name) is not None), None)
    if text is None:
        raise CorpusError(
            f"no 'contents' and no 'text', but {', '.join(record)}; expected {_FORMS}; "
            "for other names say columns, --paths.corpus_columns.text NAME"
        )
    id_ = next((name for name in IDS if name in record), None)
    title_line = text == "contents" and "\n" in str(record[text])
    return _Form(id_, text, title_line, titled=not title_line and "title" in record)


def _with_title(title: object, id_: object, text: str) -> str:
    """Return a passage in Search-R1's format: a title line, then the text. The id replaces a missing title."""
    line = " ".join(str(id_ if title is None else title).split()) or str(id_)
    return f'"{line}"\n{text}'


def _ours(record: object, columns: Mapping[str, str], row: int) -> object:
    """Return a row of your own corpus with the columns ``id`` and ``contents``, Search-R1's format."""
    if not isinstance(record, dict):
        return record
    id_, title, text, contents = (record.get(columns.get(name, name)) for name in OWN)
    id_ = row - 1 if id_ is None else id_
    if contents is None or ("text" in columns and "contents" not in columns):  # the user names the text
        if not isinstance(text, str) or not text.strip():
            name = columns.get("text", "text")
            if name not in record and "text" not in columns:
                raise CorpusError(f"no '{name}', but {', '.join(record)}; say --paths.corpus_columns.text NAME")
            raise CorpusError(f"{name} is {text!r:.80}; expected the text of a passage (columns.text)")
        contents = _with_title(title, id_, text)
    return {"id": id_, "contents": contents}


def _parquet_columns(path: Path, own: Mapping[str, str] | None, columns: list[str]) -> list[str]:
    """Return the names of the columns to read from a parquet corpus file. Raises CorpusError for a missing column."""
    names = dict.fromkeys((*IDS, *OWN) if own is None else [own.get(name, name) for name in OWN])
    wanted = [name for name in names if name in columns or name in (own or {}).values()]
    own = own or {}
    if not {own.get("text", "text"), own.get("contents", "contents")} & set(wanted):
        wanted.append("text")
    if missing := set(wanted) - set(columns):
        have = ", ".join(columns)
        raise CorpusError(f"{path}: no column {', '.join(sorted(missing))}; it has {have}; expected {_FORMS}")
    return wanted


class _SeenIds:
    """Finds duplicate passage ids. Consecutive numbers, such as the ids of wiki-18's 21 million passages, are stored as
    runs, which take almost no memory.
    """

    def __init__(self) -> None:
        self.starts, self.ends, self.rows = array("q"), array("q"), array("q")  # of runs, rising; first row
        self.others: dict[str, int] = {}  # id -> row
        self._next, self._row = "", 0  # the id and the row that extend the last run

    def add(self, id_: str, row: int) -> int | None:
        """Remember a passage id. Returns the number of the earlier row with this id, or None."""
        lengthens = id_ == self._next and row == self._row + 1
        if id_ in self.others:
            return self.others[id_]
        if lengthens:
            self.ends[-1] += 1
        elif len(id_) < 19 and id_.isascii() and id_.isdecimal() and str(int(id_)) == id_:
            number = int(id_)
            at = bisect_right(self.starts, number) - 1
            if at >= 0 and number < self.ends[at]:
                return self.rows[at] + number - self.starts[at]
            if at < len(self.starts) - 1:
                self.others[id_] = row
                return None
            self.starts.append(number)
            self.ends.append(number + 1)
            self.rows.append(row)
        else:
            self.others[id_] = row
            return None
        self._next, self._row = str(self.ends[-1]), row
        return None


def write_store(
    corpus: Path,
    folder: Path,
    part_size: int = PART_SIZE,
    columns: Mapping[str, str] | None = None,
    skip_malformed: bool = False,
) -> StoreSummary:
    """Validate the passages of ``corpus`` and copy them into ``folder`` for random access: ``passages/*.jsonl`` and
    ``offsets.bin``. ``columns``: see ``read_corpus``. With ``skip_malformed`` unusable rows are skipped and reported on
    stderr. Returns the counts and the corpus file's SHA-256.
    """
    parts = folder / "passages"
    parts.mkdir(parents=True)
    malformed = Malformed()
    offsets, numbered = array("q"), enumerate(read_corpus(corpus, columns, malformed if skip_malformed else None))
    for first in numbered:
        with (parts / f"{first[0] // part_size:05d}.jsonl").open("wb") as part:
            for row, passage in itertools.chain([first], itertools.islice(numbered, part_size - 1)):
                record = {"id": f"{row:0{_ROW_DIGITS}d}", "docid": passage.id, "contents": passage.contents}
                offsets.append(part.tell())
                part.write(orjson.dumps(record) + b"\n")
    if not offsets:
        why = f"all {malformed.rows} rows are malformed: {malformed.first[0]}" if malformed.rows else "no passages"
        raise CorpusError(f"{corpus}: {why}; expected {_FORMS}")
    if malformed.rows:
        told = "".join(f"\n  {message}" for message in malformed.first)
        print(f"{corpus}: {malformed.rows} malformed rows skipped; the first:{told}", file=sys.stderr, flush=True)
    (folder / "offsets.bin").write_bytes(offsets.tobytes())
    write_description(folder / "store.json", {"passages": len(offsets), "part_size": part_size})
    return StoreSummary(len(offsets), file_sha256(corpus), malformed.rows)


def link(source: Path, target: Path) -> None:
    """Copy a file to ``target``, as a hard link if the disk allows it."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Copy a flat folder of files to ``target``, as hard links if the disk allows it."""
    target.mkdir()
    for path in source.iterdir():
        link(path, target / path.name)


class PassageStore:
    """Random access to the passages of an index folder, through memory maps."""

    def __init__(self, folder: Path) -> None:
        layout = read_description(folder / "store.json", "passages", "part_size")
        self.passages: int = layout["passages"]
        self._part_size: int = layout["part_size"]
        self._parts = [_map(path) for path in sorted((folder / "passages").glob("*.jsonl"))]
        self._offsets = memoryview(_map(folder / "offsets.bin")).cast("q")

    def __len__(self) -> int:
        return self.passages

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < self.passages:
            raise IndexError(f"row {row} of {self.passages}")
        part = self._parts[row // self._part_size]
        start = self._offsets[row]
        record = orjson.loads(part[start : part.find(b"\n", start)])
        return Passage(record["docid"], record["contents"])

    def document(self, row: int, score: float) -> Document:
        id_, contents = self[row]
        return Document(id_, *split_contents(contents), score, heading=contents.partition("\n")[0])


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
