"""Merges concurrent search requests into calls to the thread that owns the retriever."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common.async_calls import raising_holdable
from retrieval.types import Document, Progress, SearchBackend

Answer = list[Document]  # to one query
CALL_S = 0.5  # target for the seconds of one call, see CallSize


class OwnerThread:
    """The only thread that creates, calls and closes the search backend.

    ``make`` receives a function that reports progress: a short text such as "reading faiss.index: 12 of 65 GB". Call it
    as often as you like, from any thread. Every new text counts as a heartbeat, so that a load may take hours and a
    hanging load is noticed.
    """

    def __init__(self, make: Callable[[Progress], SearchBackend]) -> None:
        self.progress = "starting"  # the last text
        self._executor = ThreadPoolExecutor(1, "retriever-owner")
        self.ready: Future[SearchBackend] = self._executor.submit(make, self._say)

    def _say(self, text: str) -> None:
        self.progress = text

    def search(self, queries: list[str], k: int) -> Future[list[Answer]]:
        return self._executor.submit(raising_holdable(lambda: self.ready.result().search(queries, k)))

    def close(self) -> None:
        """Answer all search requests so far, close the backend, and end the thread."""
        self._executor.submit(lambda: self.ready.result().close())
        self._executor.shutdown()


@dataclass(slots=True)
class _Request:
    queries: list[str]
    k: int
    answers: asyncio.Future[list[Answer]]  # done early if the client is gone, or a query has failed
    taken: int = 0  # queries computed, or in computation
    found: list[Answer] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.queries) - self.taken

    def take(self, count: int) -> list[str]:
        self.taken += count
        return self.queries[self.taken - count : self.taken]

    def add(self, answers: list[Answer]) -> None:
        self.found += answers
        if len(self.found) == len(self.queries) and not self.answers.done():
            self.answers.set_result(self.found)

    def fail(self, error: Exception) -> None:
        if not self.answers.done():
            self.answers.set_exception(error)


_Batch = list[tuple[_Request, list[str]]]  # each request, and its queries in this call


@dataclass(slots=True)
class Counters:
    """Counts of a search server's requests, queries and batches since its start."""

    requests: int = 0
    dropped: int = 0  # requests whose client hung up before the answer
    queries: int = 0  # computed
    batches: int = 0
    largest_batch: int = 0  # queries


class CallSize:
    """Limits the number of queries in one call of the search backend.

    A long call delays new requests, and a call with few queries wastes its fixed cost. The durations of the last calls
    give the fixed cost of a call (a) and the cost of each query (b). Queries may add ``CALL_S`` seconds, or 2a if that
    is more. Then a query takes at most 1.5 times as long as in the largest calls, and a call takes at most a + CALL_S
    or three times as long as for one query. Outliers do not count. While b is unknown, calls grow fourfold.
    """

    def __init__(self, largest: int = 1024) -> None:
        self._largest = largest
        self._calls: deque[tuple[int, float]] = deque(maxlen=16)  # queries, seconds
        self._warm = False

    def add(self, queries: int, seconds: float) -> None:
        if self._warm:  # the first call is not representative
            self._calls.append((queries, seconds))
        self._warm = True

    def get(self) -> int:
        size, per_query, fixed = 4, 0.0, 0.0
        if self._calls:
            pairs = itertools.combinations(self._calls, 2)
            slopes = [(t - s) / (n - m) for (m, s), (n, t) in pairs if n != m]
            if slopes:
                per_query = min(statistics.median_high(slopes), min(t / n for n, t in self._calls))
            fixed = max(0.0, min(t - per_query * n for n, t in self._calls))
            size *= max(n for n, _ in self._calls)
        wanted = max(CALL_S, 2 * fixed) / per_query if per_query > 0 else math.inf
        return max(1, int(min(size, wanted, self._largest)))


class Batcher:
    """Merges the search requests that arrive during one call of the backend into the next call.

    A call takes a fair share of large requests, and skips requests whose client is gone. Only requests with equal k are
    merged, because an approximate index may rank its first three differently for k = 100.
    Use from one event loop.
    """

    def __init__(self, owner: OwnerThread, max_batch: int = 1024) -> None:
        self.owner = owner
        self.counters = Counters()
        self._size = CallSize(max_batch)
        self._waiting: deque[_Request] = deque()
        self._worker: asyncio.Task | None = None

    async def search(self, queries: list[str], k: int) -> list[Answer]:
        """Return one answer (a list of documents) per query, in order. Raises the retriever's errors for these queries.

        Cancel the call if the answer is not needed any more.
        """
        self.counters.requests += 1
        if not queries:
            return []
        request = _Request(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await request.answers
        except asyncio.CancelledError:
            self.counters.dropped += 1
            raise

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let requests of the same event-loop iteration join the first batch
        while batch := self._take(self._size.get()):
            await self._answer(batch)

    def _take(self, size: int) -> _Batch:
        """Take up to ``size`` queries from the waiting requests whose k equals the first one's, in fair shares.
        Unfinished requests move to the end.
        """
        waiting = [request for request in self._waiting if not request.answers.done()]
        taken = [request for request in waiting if request.k == waiting[0].k][:size]
        shares: dict[int, int] = {}
        for index, request in enumerate(sorted(taken, key=lambda request: request.left)):
            shares[id(request)] = share = min(request.left, size // (len(taken) - index))
            size -= share
        batch = [(request, request.take(shares[id(request)])) for request in taken]
        rest = [request for request in waiting if id(request) not in shares]
        self._waiting = deque([*rest, *(request for request in taken if request.left)])
        return batch

    async def _answer(self, batch: _Batch) -> None:
        """Call the search backend once for the batch. If the call fails, make one per request, so that only faulty
        requests fail.
        """
        queries = [query for _, part in batch for query in part]
        self._count(len(queries))
        began = time.monotonic()
        try:
            answers: list[Any] = await asyncio.wrap_future(self.owner.search(queries, batch[0][0].k))
            if len(answers) != len(queries):
                raise ValueError(f"the retriever returned {len(answers)} answers to {len(queries)} queries")
        except Exception as error:
            if len(batch) == 1:
                batch[0][0].fail(error)
                return
            for request, part in batch:
                if not request.answers.done():
                    await self._answer([(request, part)])
            return
        self._size.add(len(queries), time.monotonic() - began)
        start = 0
        for request, part in batch:
            request.add(answers[start : start + len(part)])
            start += len(part)

    def _count(self, queries: int) -> None:
        self.counters.queries += queries
        self.counters.batches += 1
        self.counters.largest_batch = max(self.counters.largest_batch, queries)
