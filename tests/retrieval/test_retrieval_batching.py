"""How waiting requests are merged, with a retriever whose pace the test sets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest
import uvicorn

from retrieval.batching import Batcher, OwnerThread
from retrieval.client import RetrieverClient
from retrieval.server import bind, make_app
from retrieval.types import Document


class SteppedRetriever:
    """Answers each query with itself; every call waits until the test lets it go on."""

    metadata = ()

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.threads = {threading.get_ident()}
        self.go_on = threading.Semaphore(0)

    def search(self, queries, k):
        self.calls.append((queries, k))
        self.threads.add(threading.get_ident())
        self.go_on.acquire()
        if "bad" in queries:
            raise RuntimeError("no index")
        return [[Document(query, query, "", 1.0)] for query in queries]

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def run(requests: list[tuple[list[str], int]], *, max_batch: int = 1024, cancel: int | None = None):
    """The first request is in flight when the others arrive."""
    owner = OwnerThread(lambda _: SteppedRetriever())
    retriever = owner.ready.result()

    async def main():
        batcher = Batcher(owner, max_batch)
        tasks = []
        for queries, k in requests:
            tasks.append(asyncio.create_task(batcher.search(queries, k)))
            while not retriever.calls:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        if cancel is not None:
            tasks[cancel].cancel()
            await asyncio.sleep(0)
        retriever.go_on.release(100)
        return await asyncio.gather(*tasks, return_exceptions=True), batcher.counters

    answers, counters = asyncio.run(main())
    owner.close()
    assert len(retriever.threads) == 1 and threading.get_ident() not in retriever.threads
    return retriever.calls, answers, counters


def ids(answer) -> list[str]:
    return [documents[0].id for documents in answer]


def test_waiting_requests_become_one_call():
    calls, answers, counters = run([(["a"], 3), (["b", "c"], 3), ([], 3), (["d"], 3)])
    assert calls == [(["a"], 3), (["b", "c", "d"], 3)]
    assert [ids(answer) for answer in answers] == [["a"], ["b", "c"], [], ["d"]]
    assert (counters.requests, counters.queries, counters.batches, counters.largest_batch) == (4, 4, 2, 3)


def test_different_k_are_not_merged_and_none_waits_for_ever():
    calls, answers, _ = run([(["a"], 3), (["b"], 5), (["c"], 3), (["d"], 5)])
    assert calls == [(["a"], 3), (["b", "d"], 5), (["c"], 3)]
    assert [ids(answer) for answer in answers] == [["a"], ["b"], ["c"], ["d"]]


def test_batches_are_bounded_but_a_large_request_is_served():
    calls, _, _ = run([(["a"], 1), (["b"] * 2, 1), (["c"] * 2, 1), (["d"], 1), (["e"] * 9, 1)], max_batch=3)
    assert [len(queries) for queries, _ in calls] == [1, 3, 2, 9]


def test_a_failing_query_fails_alone():
    calls, answers, counters = run([(["a"], 1), (["bad"], 2), (["b", "c"], 2), (["d"], 1)])
    assert [ids(answer) for answer in (answers[0], *answers[2:])] == [["a"], ["b", "c"], ["d"]]
    assert str(answers[1]) == "no index"
    alone = [(["bad"], 2), (["b", "c"], 2)]
    assert calls == [(["a"], 1), (["bad", "b", "c"], 2), *alone, (["d"], 1)]  # a batch of one is not repeated
    assert (counters.queries, counters.batches) == (8, 5)


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_client_that_has_gone_does_not_disturb_the_others(cancelled):
    _, answers, _ = run([(["a"], 1), (["b"], 2), (["c"], 1)], cancel=cancelled)
    assert isinstance(answers[cancelled], asyncio.CancelledError)
    rest = [ids(answer) for index, answer in enumerate(answers) if index != cancelled]
    assert rest == ([["b"], ["c"]] if cancelled == 0 else [["a"], ["c"]])


def test_a_retriever_that_cannot_be_made_says_why():
    def make(_):
        raise OSError("no such index")

    with pytest.raises(OSError, match="no such index"):
        OwnerThread(make).ready.result(5)


@contextmanager
def serving(owner: OwnerThread) -> Iterator[str]:
    with bind("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(owner, 3), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.slow
def test_what_clients_have_given_up_is_not_computed():
    """50 clients behind a slow call ask four times each: their last attempts alone are computed."""
    owner = OwnerThread(lambda _: SteppedRetriever())
    retriever = owner.ready.result()

    async def main(url: str):
        async with aiohttp.ClientSession() as session:

            async def counted(name: str, least: int) -> dict:
                while (counters := await (await session.get(f"{url}/health")).json())[name] < least:
                    await asyncio.sleep(0.01)
                return counters

            slow, client = (RetrieverClient([url], timeout=s, retries=3, backoff=0.01) for s in (60, 1))
            first = asyncio.create_task(slow.search(["slow"], 1))
            await counted("batches", 1)
            others = [asyncio.create_task(client.search([f"q{number}"], 1)) for number in range(50)]
            await counted("requests", 1 + 4 * 50)
            retriever.go_on.release(100)
            answers = await asyncio.gather(first, *others)
            counters = await counted("requests", 0)
            await asyncio.gather(slow.close(), client.close())
            return [found[0].id for [found] in answers], counters

    with serving(owner) as url:
        answers, counters = asyncio.run(main(url))
    assert answers == ["slow", *(f"q{number}" for number in range(50))]
    assert (counters["requests"], counters["dropped"], counters["queries"]) == (201, 150, 51)
    assert sorted(query for queries, _ in retriever.calls for query in queries) == sorted(answers)
