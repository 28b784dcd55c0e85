"""Search results that outlive the process: an SQLite file that several processes may read and write at once.

``python -m rollout.tools.search_cache import|export DATABASE JSON`` moves results from and to the ``search_cache.json``
that ARPO's code publishes: one flat object, query to text, indented by 2, UTF-8 (dongguanting/ARPO,
verl_arpo_entropy/verl/workers/rollout/tools/search_tool.py).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout.files import write_atomically
from rollout.trajectory import Document, InfrastructureError

T = TypeVar("T")
_OURS = 0x43415343  # SQLite's application_id of these files: "CASC"
_PATIENCE_S = 30.0  # wait for another process's write
_TABLE = """CREATE TABLE IF NOT EXISTS searches (
    query TEXT NOT NULL UNIQUE, text TEXT NOT NULL CHECK (text <> ''), documents TEXT)"""
_ADD = "INSERT INTO searches VALUES (?, ?, ?) ON CONFLICT (query) "


class SearchCacheError(InfrastructureError):
    """The file is damaged, is not a search cache, or cannot be read or written now."""


@dataclass(frozen=True, slots=True)
class CachedSearch:
    text: str
    documents: tuple[Document, ...] | None  # None: imported, only the text is known


def cache_key(query: str) -> str:
    """The query without double quotes, otherwise exactly as it is, as published. Half a surrogate pair, which no file
    can hold, becomes "?".

    >>> cache_key('who wrote "Emma"')
    'who wrote Emma'
    """
    return query.replace('"', "").encode("utf-8", "replace").decode("utf-8")


class SearchCache:
    """Texts (and documents) by query.

    A write is kept once ``put`` has returned, even if the process is killed at the next moment; after a loss of power
    the latest writes may be missing, the file is whole. The methods with ``await`` run in a thread of their own.
    The file must lie on a local disk: SQLite's write-ahead log needs memory shared between the processes.

    Args:
        path: the SQLite file, made when it is not there; its folder must exist.

    Raises:
        SearchCacheError: on construction and later; says what is wrong with the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        if not self.path.parent.is_dir():
            raise SearchCacheError(f"search cache {self.path}: there is no folder {self.path.parent}; make it first")
        self.count()

    # -- in the event loop ------------------------------------------------------------------------------------------

    async def get(self, query: str) -> CachedSearch | None:
        return await self._in_thread(self.lookup, query)

    async def put(self, query: str, text: str, documents: Sequence[Document] | None = None) -> None:
        await self._in_thread(self.store, query, text, documents)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="search-cache")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- anywhere ---------------------------------------------------------------------------------------------------

    def lookup(self, query: str) -> CachedSearch | None:
        asked = "SELECT text, documents FROM searches WHERE query = ?"
        with self._database() as database:
            row = database.execute(asked, (cache_key(query),)).fetchone()
        if row is None:
            return None
        text, documents = row
        return CachedSearch(text, None if documents is None else tuple(Document(*d) for d in json.loads(documents)))

    def store(self, query: str, text: str, documents: Sequence[Document] | None = None) -> None:
        """Keep a result in the place of any earlier one. An empty text means a failure and is never kept."""
        if not text:
            return
        encoded = None if documents is None else json.dumps([astuple(document) for document in documents])
        with self._database() as database:
            replace = "DO UPDATE SET text = excluded.text, documents = excluded.documents"
            database.execute(_ADD + replace, (cache_key(query), _storable(text), encoded))

    def count(self) -> int:
        with self._database() as database:
            return database.execute("SELECT count(*) FROM searches").fetchone()[0]

    def import_json(self, path: str | Path) -> int:
        """Add what is new in a ``search_cache.json``; what is known stays as it is. Returns how many were added.

        Raises ValueError when the file is no JSON or not of that shape (nothing is imported then), OSError when it
        cannot be read.
        """
        rows = [(cache_key(query), _storable(text), None) for query, text in read_published(Path(path)).items() if text]
        with self._database() as database:
            database.execute("BEGIN IMMEDIATE")
            before = database.total_changes
            database.executemany(_ADD + "DO NOTHING", rows)
            added = database.total_changes - before
            database.execute("COMMIT")
        return added

    def export_json(self, path: str | Path) -> int:
        """Write all texts as a ``search_cache.json``, in the order in which they came. Returns how many."""
        with self._database() as database:
            texts = dict(database.execute("SELECT query, text FROM searches ORDER BY rowid"))
        write_atomically(Path(path), json.dumps(texts, indent=2, ensure_ascii=False))
        return len(texts)

    def close(self) -> None:
        """A later use opens the file again."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # -- the file ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """The open file, for one thread at a time; what fails is undone and told with the file's name."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self.path)
                yield self._connection
            except sqlite3.Error as error:
                raise SearchCacheError(self._explain(error)) from error
            finally:
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.rollback()

    def _explain(self, error: sqlite3.Error) -> str:
        damaged = type(error) is sqlite3.DatabaseError  # "not a database", "malformed"; its subclasses are other things
        advice = "; the file is damaged: move it away, and import a search_cache.json if you have one"
        return f"search cache {self.path}: {error}" + (advice if damaged else "")


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        [owner] = connection.execute("PRAGMA application_id").fetchone()
        [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if owner != _OURS and (owner or tables):
            raise SearchCacheError(f"search cache {path}: an SQLite file of something else; name another file")
        connection.execute(f"PRAGMA application_id = {_OURS}")
        connection.execute(_TABLE)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait here when another process is changing the mode as well."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def read_published(path: Path) -> dict[str, str]:
    """A ``search_cache.json``. Raises ValueError for anything but one object of texts, OSError as ``open``."""
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
    if len(arguments) != 3 or arguments[0] not in ("import", "export"):
        sys.exit(f"python -m rollout.tools.search_cache import|export DATABASE JSON; found {list(arguments)}")
    command, database, file = arguments
    try:
        if command == "export" and not Path(database).is_file():
            raise ValueError(f"there is no search cache {database}")
        cache = SearchCache(database)
        n = cache.import_json(file) if command == "import" else cache.export_json(file)
        print(f"{n} searches {command}ed; {cache.count()} in {database}")
        cache.close()
    except (SearchCacheError, ValueError, OSError) as error:
        sys.exit(f"search cache: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
