"""Cache of search results in an SQLite file, which several processes may read and write at once.

``python -m rollout.tools.web.search_cache import DATABASE JSON`` adds the results of ARPO's published
``search_cache.json``: one flat object, query to text (dongguanting/ARPO,
verl_arpo_entropy/verl/workers/rollout/tools/search_tool.py).
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rollout.trajectory import Document, InfrastructureError

_PATIENCE_S = 30.0  # wait for another process's write
_TABLE = """CREATE TABLE IF NOT EXISTS searches (
    query TEXT NOT NULL UNIQUE, text TEXT NOT NULL CHECK (text <> ''), documents TEXT)"""
_ADD = "INSERT INTO searches VALUES (?, ?, ?) ON CONFLICT (query) "


class SearchCacheError(InfrastructureError):
    """The file of a search cache is damaged, or cannot be read or written now."""


@dataclass(frozen=True, slots=True)
class CachedSearch:
    text: str
    documents: tuple[Document, ...] | None  # None: imported, only the text is known


def cache_key(query: str) -> str:
    """Return a search query as the cache stores it: without double quotes, otherwise unchanged, as published. Half a
    surrogate pair, which no file can hold, becomes "?".

    >>> cache_key('who wrote "Emma"')
    'who wrote Emma'
    """
    return _storable(query.replace('"', ""))


class SearchCache:
    """Caches search results (texts and documents) by query in an SQLite file. A write is durable once ``store`` has
    returned, even if the process is killed then.

    Args:
        path: the SQLite file, made when it is missing; its folder must exist.
        options: options besides the query that change results. The first stored result writes them into the file, which
            then refuses other options; imported results have none.

    Raises:
        SearchCacheError: on construction and later; says what is wrong with the file.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any] | None = None) -> None:
        self.path, self._options = Path(path), None if options is None else json.dumps(options)
        if not self.path.parent.is_dir():
            raise SearchCacheError(f"search cache {self.path}: there is no folder {self.path.parent}; make it first")
        self.count()
        with self._database() as database:
            if database.execute("SELECT * FROM sqlite_master WHERE name = 'options'").fetchone():
                self._require_same_options(database)

    def lookup(self, query: str) -> CachedSearch | None:
        with self._database() as database:
            asked = "SELECT text, documents FROM searches WHERE query = ?"
            row = database.execute(asked, (cache_key(query),)).fetchone()
        if row is None:
            return None
        text, documents = row
        return CachedSearch(text, None if documents is None else tuple(Document(*d) for d in json.loads(documents)))

    def store(self, query: str, text: str, documents: Sequence[Document] | None = None) -> None:
        """Store the result of a search; it replaces an earlier one. An empty text means a failure and is never
        stored."""
        if not text:
            return
        encoded = None if documents is None else json.dumps([astuple(document) for document in documents])
        with self._database() as database:
            replace = "DO UPDATE SET text = excluded.text, documents = excluded.documents"
            database.execute(_ADD + replace, (cache_key(query), _storable(text), encoded))
            if self._options is not None:
                database.execute("CREATE TABLE IF NOT EXISTS options (options TEXT NOT NULL)")
                first = "INSERT INTO options SELECT ? WHERE NOT EXISTS (SELECT * FROM options)"
                database.execute(first, (self._options,))
                self._require_same_options(database)

    def _require_same_options(self, database: sqlite3.Connection) -> None:
        (theirs,) = database.execute("SELECT options FROM options").fetchone() or (self._options,)
        if self._options not in (None, theirs):
            raise SearchCacheError(
                f"search cache {self.path} holds results for {theirs}, not for {self._options}: take another file"
            )

    def count(self) -> int:
        with self._database() as database:
            return database.execute("SELECT count(*) FROM searches").fetchone()[0]

    def import_json(self, path: str | Path) -> int:
        """Add the new entries of a ``search_cache.json`` to the cache and keep the known ones. Returns how many were
        added.

        Raises ValueError when the file is not JSON or not of that shape (nothing is imported then), OSError when it
        cannot be read.
        """
        rows = [(cache_key(query), _storable(text), None) for query, text in read_published(Path(path)).items() if text]
        with self._database() as database:
            before = database.total_changes
            database.executemany(_ADD + "DO NOTHING", rows)
            return database.total_changes - before

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Context manager that opens the SQLite file for one transaction; a failure rolls back and names the file."""
        try:
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE_S)) as connection, connection:
                connection.execute(_TABLE)
                yield connection
        except sqlite3.Error as error:
            raise SearchCacheError(f"search cache {self.path}: {error}") from error


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def read_published(path: Path) -> dict[str, str]:
    """Return the texts by query in a published ``search_cache.json``. Raises ValueError for anything but one object of
    texts, OSError as ``open``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path}: expected JSON in UTF-8; {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: found {type(found).__name__}; expected one JSON object, {{query: text}}")
    for query, text in found.items():
        if not isinstance(text, str):
            raise ValueError(f"{path}: entry {query!r} is {type(text).__name__}; expected a text")
    return found


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 3 or arguments[0] != "import":
        sys.exit(f"python -m rollout.tools.web.search_cache import DATABASE JSON; found {list(arguments)}")
    _, database, file = arguments
    try:
        cache = SearchCache(database)
        print(f"{cache.import_json(file)} searches imported; {cache.count()} in {database}")
    except (SearchCacheError, ValueError, OSError) as error:
        sys.exit(f"search cache: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
