"""Merges concurrent search requests into calls for the one thread that owns the retriever."""

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

from retrieval.types import Document, Progress, SearchBackend

Answer = list[Document]  # to one query
CALL_S = 0.5  # seconds that the queries of one call may take, see CallSize


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
class _Request:
    queries: list[str]
    k: int
    answers: asyncio.Future[list[Answer]]  # done before its time: the client is gone, or a query has failed
    taken: int = 0  # queries that are computed, or are being computed
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


_Batch = list[tuple[_Request, list[str]]]  # what is taken of each request


@dataclass(slots=True)
class Counters:
    """What a server has done since it started."""

    requests: int = 0
    dropped: int = 0  # requests whose client hung up before it had its answer
    queries: int = 0  # computed
    batches: int = 0
    largest_batch: int = 0  # queries


class CallSize:
    """How many queries one call may take, so that neither a new request waits long for the call before it, nor calls
    that cost much whatever they hold are spent on few queries.

    What the last calls took tells what a call costs without queries (a), and what each query adds (b). Queries may add
    ``CALL_S`` seconds, or twice a if that is more: a query then takes at most 1.5 times what it takes in the largest
    calls, and a call at most three times what it takes for one query, if not a + CALL_S. Single calls that are slow by
    chance do not count. As long as b is not known, calls grow fourfold.
    """

    def __init__(self, largest: int = 1024) -> None:
        self._largest = largest
        self._calls: deque[tuple[int, float]] = deque(maxlen=16)  # queries, seconds
        self._warm = False

    def add(self, queries: int, seconds: float) -> None:
        if self._warm:  # what the first call takes says nothing of the others
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
    """While one call runs, requests queue up; the next call takes of all of them that want the same k, of large ones a
    fair share. What nobody waits for any more is not computed.

    Only equal k are merged: an approximate index may rank its first three differently when asked for a hundred.
    Use from one event loop.
    """

    def __init__(self, owner: OwnerThread, max_batch: int = 1024) -> None:
        self.owner = owner
        self.counters = Counters()
        self._size = CallSize(max_batch)
        self._waiting: deque[_Request] = deque()
        self._worker: asyncio.Task | None = None

    async def search(self, queries: list[str], k: int) -> list[Answer]:
        """One answer per query, in order. Raises what the retriever raises for these queries. Cancel it when nobody
        waits for the answer any more."""
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
        await asyncio.sleep(0)  # let requests that arrived in the same turn of the loop join the first batch
        while batch := self._take(self._size.get()):
            await self._answer(batch)

    def _take(self, size: int) -> _Batch:
        """Up to ``size`` queries of the requests that want the same k as the first: of each all, or as many as of any
        other. Those that are not finished by that go to the end."""
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
        """One call for the batch; if it fails, one for each request, so that only those fail that fail alone."""
        queries = [query for _, part in batch for query in part]
        self._count(len(queries))
        began = time.monotonic()
        try:
            answers: list[Any] = await asyncio.wrap_future(self.owner.search(queries, batch[0][0].k))
            if len(answers) != len(queries):
                raise ValueError(f"the retriever gave {len(answers)} answers to {len(queries)} queries")
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
