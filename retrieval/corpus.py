"""Reads corpus files and stores their passages, validated, for random access.

A corpus is what Search-R1 uses: one passage per line, ``{"id": "7", "contents": "\\"Title\\"\\ntext"}``, or a parquet
file with the same two columns.  With ``columns`` it is of your own shape: a title and a text, or a text alone, with
ids or without.  The store is a copy of it that every kind of index keeps beside itself: JSON lines in
parts (Lucene's indexer reads these files as they are) and an array of byte offsets.  It is read through memory maps,
so that a server over 21 million passages starts at once and keeps no passage in its own memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import orjson

from retrieval.types import CorpusError, Document, split_contents

PART_SIZE = 500_000  # passages per part: Lucene's indexer gives one thread to each file
_ROW_DIGITS = 10  # rows are zero-padded: Lucene breaks ties by id, so that ties come in corpus order
OWN = ("id", "title", "text", "contents")  # the columns of a corpus of your own shape
_FORMAT = 'expected {"id": "7", "contents": "\\"Title\\"\\nText of the passage"}'


class Passage(NamedTuple):
    id: str
    contents: str


class StoreSummary(NamedTuple):
    passages: int
    sha256: str  # of the corpus file's bytes


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_corpus(corpus: str | Path) -> Path:
    """The corpus file, or a CorpusError that says what is missing."""
    path = Path(corpus)
    if not path.is_file():
        raise CorpusError(f"corpus {path}: no such file; give a .jsonl or .parquet file of passages ({_FORMAT})")
    return path


def read_corpus(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Passage]:
    """Passages in file order.

    Args:
        columns: for a corpus of your own shape, ``id``, ``title`` and ``text`` (or ``contents``) by the file's own
            names; {} where it has these names. Without an id it is the row's number, without a title the id stands
            there. None: ``id`` and ``contents``, as in Search-R1.

    Raises:
        CorpusError: at the first line that cannot be used.
    """
    for _, found in passages(path, columns):
        if isinstance(found, CorpusError):
            raise found
        yield found


def passages(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[tuple[int, Passage | CorpusError]]:
    """Of every line (of parquet: row, both from 1) its passage, or why it cannot be used; see ``read_corpus``.

    Raises:
        CorpusError: a file that is not what its ending says, or without a column that is needed.
    """
    if unknown := sorted(set(columns or {}) - set(OWN)):
        raise CorpusError(f"columns.{unknown[0]} is no column of a corpus; expected {', '.join(OWN)}")
    unit = "row" if path.suffix == ".parquet" else "line"
    seen = _SeenIds(path, unit)
    rows = _json_rows(path) if unit == "line" else _parquet_rows(path, columns)
    mapped = {theirs: ours for ours, theirs in (columns or {}).items()}
    found: list[str] = []  # of the last line, while a mapped column was in none
    for number, record in rows:
        try:
            if isinstance(record, CorpusError):
                raise record
            if mapped and isinstance(record, dict):
                found = list(record)
                mapped = {theirs: ours for theirs, ours in mapped.items() if theirs not in record}
            where = f"{path}, {unit} {number}"
            passage = _to_passage(record if columns is None else _ours(record, columns, number, where), where)
            seen.add(passage.id, number)
            yield number, passage
        except CorpusError as fault:
            yield number, fault
    for theirs, ours in mapped.items() if found else ():
        raise CorpusError(f"{path}: no line has '{theirs}' (columns.{ours}); they have {', '.join(found)}")


def _ours(record: object, columns: Mapping[str, str], number: int, where: str) -> object:
    """A row of a corpus of your own shape as Search-R1 would write it."""
    if not isinstance(record, dict):
        return record
    id_, title, text, contents = (record.get(columns.get(name, name)) for name in OWN)
    id_ = number - 1 if id_ is None else id_
    if contents is None:
        if not isinstance(text, str) or not text.strip():
            name = columns.get("text", "text")
            if name not in record and "text" not in columns:
                there = ", ".join(record)
                raise CorpusError(f"{where}: no '{name}', but {there}; say --paths.corpus_columns.text NAME")
            raise CorpusError(f"{where}: {name} is {text!r:.80}; expected the text of a passage (columns.text)")
        title = " ".join(str(id_ if title is None else title).split()) or str(id_)
        contents = f'"{title}"\n{text}'
    return {"id": id_, "contents": contents}


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                record = CorpusError(
                    f"{path}, line {number}: not JSON ({error}); found {line[:80]!r}, {_FORMAT}; "
                    "mend or remove the line"
                )
            yield number, record


def _parquet_rows(path: Path, own: Mapping[str, str] | None, chunk: int = 100_000) -> Iterator[tuple[int, object]]:
    import polars as pl

    try:
        frame = pl.scan_parquet(path)
        columns = frame.collect_schema().names()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise CorpusError(f"{path}: not a parquet file ({error}); write it again or give a .jsonl file") from error
    wanted = ["id", "contents"]
    if own is not None:
        named = dict.fromkeys(own.get(name, name) for name in OWN)
        wanted = [name for name in named if name in columns or name in own.values()]
        if not {own.get("text", "text"), own.get("contents", "contents")} & set(wanted):
            wanted.append("text")
    missing = set(wanted) - set(columns)
    if missing:
        raise CorpusError(f"{path}: no column {', '.join(sorted(missing))}; it has {', '.join(columns)}; {_FORMAT}")
    start = 0
    while len(rows := frame.select(wanted).slice(start, chunk).collect()):
        yield from enumerate(rows.iter_rows(named=True), start=start + 1)
        start += chunk


def _to_passage(record: object, where: str) -> Passage:
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: found {type(record).__name__}, {_FORMAT}")
    for key in ("id", "contents"):
        if record.get(key) is None:
            raise CorpusError(f"{where}: no {key!r}; found the keys {sorted(record)}, {_FORMAT}")
    id_, contents = record["id"], record["contents"]
    if isinstance(id_, bool) or not isinstance(id_, (str, int)) or id_ == "":
        raise CorpusError(f"{where}: id is {id_!r}; expected a text or a whole number")
    if not isinstance(contents, str):
        raise CorpusError(f"{where}: contents is {type(contents).__name__}; expected a text")
    title, line_break, text = contents.partition("\n")
    if not line_break or not title.strip() or not text.strip():
        raise CorpusError(f'{where}: contents {contents[:80]!r} is not a title line followed by text ("Title"\\ntext)')
    return Passage(str(id_), contents)


class _SeenIds:
    """Finds duplicate ids; costs no memory for ids that are the row numbers, as wiki-18's 21 million are."""

    def __init__(self, path: Path, unit: str) -> None:
        self.path, self.unit = path, unit
        self.others: dict[str, int] = {}  # id -> line, for ids that are not their own row number
        self.other_lines: set[int] = set()

    def add(self, id_: str, line: int) -> None:
        first = self.others.get(id_)
        if first is None and id_ != str(line - 1):
            if id_.isascii() and id_.isdecimal() and str(int(id_)) == id_:
                candidate = int(id_) + 1
                first = candidate if candidate < line and candidate not in self.other_lines else None
            if first is None:
                self.others[id_] = line
                self.other_lines.add(line)
                return
        if first is not None:
            raise CorpusError(
                f"{self.path}, {self.unit} {line}: id {id_!r} was already used in {self.unit} {first}; "
                "ids must be unique: number the passages anew or remove one of them"
            )


def write_store(
    corpus: Path, folder: Path, part_size: int = PART_SIZE, columns: Mapping[str, str] | None = None
) -> StoreSummary:
    """Validate ``corpus`` (``columns``: see ``read_corpus``) and copy it into ``folder``: ``passages/*.jsonl`` and
    ``offsets.bin``."""
    parts = folder / "passages"
    parts.mkdir(parents=True)
    offsets, numbered = array("q"), enumerate(read_corpus(corpus, columns))
    for first in numbered:
        with (parts / f"{first[0] // part_size:05d}.jsonl").open("wb") as part:
            for row, passage in itertools.chain([first], itertools.islice(numbered, part_size - 1)):
                record = {"id": f"{row:0{_ROW_DIGITS}d}", "docid": passage.id, "contents": passage.contents}
                offsets.append(part.tell())
                part.write(orjson.dumps(record) + b"\n")
    if not offsets:
        raise CorpusError(f"{corpus}: no passages; {_FORMAT}")
    (folder / "offsets.bin").write_bytes(offsets.tobytes())
    (folder / "store.json").write_text(json.dumps({"passages": len(offsets), "part_size": part_size}))
    return StoreSummary(len(offsets), file_sha256(corpus))


class PassageStore:
    """Random access to the passages of an index folder, through memory maps."""

    def __init__(self, folder: Path) -> None:
        layout = json.loads((folder / "store.json").read_text())
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
