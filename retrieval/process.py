"""A retriever that starts and stops its own search server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import orjson

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval
from common.restarts import Restarts
from common.run_folder import run_folder
from retrieval.client import RetrieverClient
from retrieval.retriever import SearchSettings, check_indexes
from retrieval.server_process import ServerProcess
from retrieval.types import Document, RetrievalError

SHARED_VARIABLE = "COMPACT_AGENTS_RETRIEVERS"  # servers that several processes share: identity -> URL, as JSON


class RetrieverProcess:
    """Retriever that starts a search server at the first search. The server ends with this process, even by kill -9.

    A server that dies is replaced, and searches wait for the next one. If ``SHARED_VARIABLE`` names a server with the
    same indexes and settings, that server is used instead: the launcher of several ranks starts one for all.

    Each server takes a free port, so several can run on one machine.  It runs in a new session, so that Ctrl-C reaches
    only its owner, which may still search while it ends.

    Args:
        index: index folder, or several that are fused (hybrid).
        topk: passages per query if ``search`` gets no number.
        threads: of Lucene, torch and Faiss in the server.
        corpus: if given, the file that the index must have been built from.
        k1, b, java_heap, encoder, device, gpu, ef_search, probes: see ``retrieval.retriever.SearchSettings``.
        log: file for the server's output; by default a temporary one.
        start_timeout: seconds without a progress report until the server is ready. Each report (see
            ``retrieval.batching.OwnerThread``) restarts the wait, so a large index may take as long as it needs.
        restarts: restarts of the server per hour, at most. After that searches fail with the reason.
        timeout, retries, backoff, max_connections: see ``RetrieverClient``.
    """

    def __init__(
        self,
        index: str | list[str],
        topk: PositiveInt = 3,
        threads: PositiveInt = 1,
        corpus: str | None = None,
        k1: NonNegativeFloat | None = None,
        b: UnitInterval | None = None,
        java_heap: str | None = None,
        encoder: str | None = None,
        device: str | None = None,
        gpu: bool = False,
        ef_search: PositiveInt | None = None,
        probes: PositiveInt | None = None,
        log: str | None = None,
        start_timeout: PositiveFloat = 120,
        restarts: NonNegativeInt = 3,
        timeout: PositiveFloat = 10,
        retries: NonNegativeInt = 3,
        backoff: NonNegativeFloat = 0.2,
        max_connections: PositiveInt = 64,
    ) -> None:
        self.indexes = [index] if isinstance(index, str) else list(index)
        self.topk, self.corpus, self.log = topk, corpus, log
        self.start_timeout, self._restarts = start_timeout, Restarts(restarts)
        self.settings = SearchSettings(threads, k1, b, java_heap, encoder, device, gpu or None, ef_search, probes)
        self._client_options = {
            "timeout": timeout, "retries": retries, "backoff": backoff, "max_connections": max_connections,
        }  # fmt: skip
        self.url: str | None = None
        self._server: ServerProcess | None = None
        self._client: RetrieverClient | None = None
        self._finalizer: weakref.finalize | None = None
        self._start_error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The identity of the server as text: equal for two objects that would start equal servers."""
        settings = dataclasses.asdict(self.settings) | {"corpus": self.corpus}
        indexes = [os.path.abspath(index) for index in self.indexes]
        return orjson.dumps([indexes, settings], option=orjson.OPT_SORT_KEYS).decode()

    @property
    def failure(self) -> str | None:
        """The reason why the search server is no longer restarted, as text, or None."""
        server = self._server  # another thread may stop it
        return server.failure if server else None

    def start(self) -> str:
        """Start the search server, unless it runs, and wait until it is ready. Returns its URL.

        Raises IndexFolderError or CorpusError, before the start, if the index is missing or of another corpus, and
        RetrieverStartError with the end of the log if the server fails to start.
        """
        with self._lock:
            if self._start_error is not None:  # hundreds of searches may wait for one start, and share its failure
                raise self._start_error
            if self.url is None:
                try:
                    self.settings.check(check_indexes(self.indexes, self.corpus))
                    self.url = self._shared() or self._launch()
                except Exception as error:
                    self._start_error = error
                    raise
                self._client = RetrieverClient([self.url], **self._client_options)
            return self.url

    async def search(self, queries: list[str], k: int | None = None) -> list[list[Document]]:
        """Return at most ``k`` documents per query (default ``topk``), best first. Starts the server if needed; see
        ``RetrieverClient.search``.
        """
        if self._client is None:
            await asyncio.to_thread(self.start)
        client = self._client
        if client is None:
            raise RetrievalError("the retriever was closed while it started")
        try:
            return await client.search(queries, self.topk if k is None else k)
        except RetrievalError as error:
            if (failure := self.failure) is None:
                raise
            raise RetrievalError(failure) from error

    async def close(self) -> None:
        """Close the connections to the search server and end it. A later ``start`` or ``search`` starts another one."""
        client = self._client
        self.stop()
        if client is not None:
            await client.close()

    def stop(self) -> None:
        """End the search server and wait for its end, from any thread. After a search use ``close``, which also closes
        the connections.
        """
        with self._lock:
            self._client = self.url = self._start_error = None
            if self._server is None or self._finalizer is None:
                return
            self._finalizer()
            if self.log is None:
                self._server.log.unlink(missing_ok=True)
            self._server = self._finalizer = None

    def _make_log(self) -> Path:
        if self.log is None:
            handle, name = tempfile.mkstemp(".log", "retriever-", run_folder())
            os.close(handle)
            return Path(name)
        path = Path(self.log)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "retrieval.server", "--index", *self.indexes]
        options = {"topk": self.topk, **dataclasses.asdict(self.settings)}
        for name, value in options.items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return command

    def _shared(self) -> str | None:
        return orjson.loads(os.environ.get(SHARED_VARIABLE, "{}")).get(self.identity)

    def _launch(self) -> str:
        self._server = ServerProcess(self._command(), self._make_log(), self.start_timeout, self._restarts)
        self._finalizer = weakref.finalize(self, self._server.end)
        return self._server.start()
