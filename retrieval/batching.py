"""Merges concurrent search requests into batches for the one thread that owns the retriever."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from retrieval.types import Document, Progress, SearchBackend

Answer = list[Document]  # to one query
ASK_AFTER_S = 0.5  # seconds; no client gives up sooner, and asking costs the server time


class ClientGone(Exception):
    """Nobody waits for this answer any more, so it was not computed."""


class OwnerThread:
    """The only thread that ever touches the backend: it makes it, calls it and closes it.

    ``make`` is handed a function to say how far it is: a short text such as "reading faiss.index: 12 of 65 GB". Call it
    as often as you like, from any thread. What waits for the retriever shows the text, and takes every new one for a
    sign of life, so that a load may take hours while one that hangs is noticed.
    """

    def __init__(self, make: Callable[[Progress], SearchBackend]) -> None:
        self.progress = "starting"  # the last text
        self._executor = ThreadPoolExecutor(1, "retriever-owner")
        self.ready: Future[SearchBackend] = self._executor.submit(make, self._say)

    def _say(self, text: str) -> None:
        self.progress = text

    def search(self, queries: list[str], k: int) -> Future[list[Answer]]:
        return self._executor.submit(lambda: self.ready.result().search(queries, k))

    def close(self) -> None:
        """Answer what has been asked, close the backend, end the thread."""
        self._executor.submit(lambda: self.ready.result().close())
        self._executor.shutdown()


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    k: int
    gone: Callable[[], Awaitable[bool]]
    since: float  # time.monotonic()
    answers: asyncio.Future


@dataclass(slots=True)
class Counters:
    """What a server has done since it started."""

    requests: int = 0
    dropped: int = 0  # requests whose client had gone before they were computed
    queries: int = 0  # computed
    batches: int = 0
    largest_batch: int = 0  # queries


class Batcher:
    """While one call runs, requests queue up; the next call takes all of them that want the same k.

    Only equal k are merged: an approximate index may rank its first three differently when asked for a hundred.
    Use from one event loop.
    """

    def __init__(self, owner: OwnerThread, max_batch: int = 1024) -> None:
        self.owner, self.max_batch = owner, max_batch
        self.counters = Counters()
        self._waiting: deque[_Waiting] = deque()
        self._worker: asyncio.Task | None = None

    async def search(
        self, queries: list[str], k: int, gone: Callable[[], Awaitable[bool]] | None = None
    ) -> list[Answer]:
        """One answer per query, in order. Raises what the retriever raises for these queries; ClientGone if ``gone``
        says, before they are computed, that nobody waits for them any more."""
        request = _Waiting(queries, k, gone or _stays, time.monotonic(), asyncio.get_running_loop().create_future())
        self.counters.requests += 1
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.answers

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let requests that arrived in the same turn of the loop join the first batch
        while self._waiting:
            await self._drop_gone(self._waiting)
            if batch := self._take():  # empty: their clients have all gone
                await self._answer(batch)

    async def _answer(self, batch: list[_Waiting]) -> None:
        """One call for the batch; if it fails, one for each request, so that only those fail that fail alone."""
        queries = [query for request in batch for query in request.queries]
        self._count(len(queries))
        try:
            answers: list[Any] = await asyncio.wrap_future(self.owner.search(queries, batch[0].k))
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for request in batch:
                await self._drop_gone([request])
                if not request.answers.done():
                    await self._answer([request])
        else:
            _distribute(batch, answers)

    async def _drop_gone(self, requests: Iterable[_Waiting]) -> None:
        old = [request for request in requests if time.monotonic() - request.since > ASK_AFTER_S]
        if not old:  # gather() of nothing would cost a turn of the loop
            return
        for request, gone in zip(old, await asyncio.gather(*(request.gone() for request in old)), strict=True):
            if gone and not request.answers.done():
                self.counters.dropped += 1
                _fail(request, ClientGone())

    def _take(self) -> list[_Waiting]:
        k, size, batch, later = self._waiting[0].k, 0, [], []
        for request in self._waiting:
            if request.answers.done():  # its client has gone
                continue
            if request.k == k and (not batch or size + len(request.queries) <= self.max_batch):
                batch.append(request)
                size += len(request.queries)
            else:
                later.append(request)
        self._waiting = deque(later)
        return batch

    def _count(self, queries: int) -> None:
        self.counters.queries += queries
        self.counters.batches += 1
        self.counters.largest_batch = max(self.counters.largest_batch, queries)


def _distribute(batch: list[_Waiting], answers: list[Answer]) -> None:
    start = 0
    for request in batch:
        end = start + len(request.queries)
        if not request.answers.done():
            request.answers.set_result(answers[start:end])
        start = end


def _fail(request: _Waiting, error: Exception) -> None:
    if not request.answers.done():
        request.answers.set_exception(error)


async def _stays() -> bool:
    return False
