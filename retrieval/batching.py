"""Many concurrent requests, one thread that owns the retriever: waiting requests are merged into one call."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

Answer = list[tuple[dict[str, str], float]]  # one query's documents and scores


class _Retriever(Protocol):
    def search(self, queries: list[str], k: int) -> list[Answer]: ...

    def close(self) -> None: ...


class OwnerThread:
    """The only thread that ever touches the retriever: it makes it, calls it and closes it.

    A daemon, so that a server told to stop while an index loads need not wait for the loading.
    """

    def __init__(self, make: Callable[[], _Retriever]) -> None:
        self.ready: Future[_Retriever] = Future()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make,), name="retriever-owner", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], _Retriever]) -> None:
        try:
            retriever = make()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(retriever)
        while (job := self._jobs.get()) is not None:
            queries, k, answers = job
            try:
                answers.set_result(retriever.search(queries, k))
            except Exception as error:  # travels to those who asked
                answers.set_exception(error)
        retriever.close()

    def search(self, queries: list[str], k: int) -> Future[list[Answer]]:
        answers: Future[list[Answer]] = Future()
        self._jobs.put((queries, k, answers))
        return answers

    def close(self) -> None:
        """Answer what has been asked, close the retriever, end the thread."""
        self._jobs.put(None)
        self._thread.join()


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    k: int
    answers: asyncio.Future


@dataclass(slots=True)
class Counters:
    """What a server has done since it started."""

    requests: int = 0
    queries: int = 0
    batches: int = 0
    largest_batch: int = field(default=0)  # queries


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

    async def search(self, queries: list[str], k: int) -> list[Answer]:
        """One answer per query, in order. Raises what the retriever raises."""
        request = _Waiting(queries, k, asyncio.get_running_loop().create_future())
        self.counters.requests += 1
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.answers

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let requests that arrived in the same turn of the loop join the first batch
        while self._waiting:
            batch = self._take()
            if not batch:  # their clients have all gone
                continue
            queries = [query for request in batch for query in request.queries]
            self._count(len(queries))
            try:
                answers: list[Any] = await asyncio.wrap_future(self.owner.search(queries, batch[0].k))
            except Exception as error:
                _fail(batch, error)
            else:
                _distribute(batch, answers)

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


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for request in batch:
        if not request.answers.done():
            request.answers.set_exception(error)
