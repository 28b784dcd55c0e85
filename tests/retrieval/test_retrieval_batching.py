"""How waiting requests are merged, with a retriever whose pace the test sets."""

import asyncio
import json
import threading

import aiohttp
import pytest

from retrieval.batching import Batcher, CallSize, OwnerThread
from retrieval.client import RetrieverClient
from retrieval.types import Document
from tests.processes import with_patience
from tests.retrieval.serving import serving


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


def run(requests: list[tuple[list[str], int]], *, max_batch: int = 1024, cancel: int | None = None, after: int = 1):
    """The first request is in flight when the others arrive; one is cancelled when ``after`` calls have begun."""
    owner = OwnerThread(lambda _: SteppedRetriever())
    retriever = owner.ready.result()

    async def called(count: int) -> None:
        while len(retriever.calls) < count:
            await asyncio.sleep(0.001)

    async def main():
        batcher = Batcher(owner, max_batch)
        tasks = []
        for queries, k in requests:
            tasks.append(asyncio.create_task(batcher.search(queries, k)))
            await called(1)
        await asyncio.sleep(0.01)
        if cancel is not None:
            for number in range(1, after):
                retriever.go_on.release()
                await called(number + 1)
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


def test_batches_are_bounded_and_of_a_large_request_each_takes_a_share():
    nine = [f"e{number}" for number in range(9)]
    calls, answers, _ = run([(["a"], 1), (nine, 1), (["b", "c"], 1), (["d"], 1), (["f"], 1)], max_batch=4)
    assert [queries for queries, _ in calls[:3]] == [["a"], ["e0", "b", "d", "f"], ["e1", "e2", "e3", "c"]]
    assert [len(queries) for queries, _ in calls[3:]] == [4, 1]
    assert [ids(answer) for answer in answers] == [["a"], nine, ["b", "c"], ["d"], ["f"]]


def test_what_is_left_of_a_large_request_is_dropped_with_its_client():
    calls, answers, counters = run([(["a"], 1), (["b"] * 9, 1), (["c"], 1)], max_batch=3, cancel=1, after=2)
    assert [queries for queries, _ in calls] == [["a"], ["b", "b", "c"]] and ids(answers[2]) == ["c"]
    assert (counters.dropped, counters.queries) == (1, 4)


@pytest.mark.parametrize(
    ("fixed", "per_query", "expected"),
    [
        (0.0, 1e-4, 1024),
        (0.0, 0.001, 500),
        (0.0, 0.02, 25),
        (0.0, 2.0, 1),
        (0.2, 0.016, 31),
        (3.0, 0.0, 1024),  # a chunk sized for a time alone would shrink to one query, each of which takes 3 s
        (3.0, 0.01, 600),
    ],
)
@pytest.mark.parametrize("odd", ["none", "first call", "some calls"])
def test_how_many_queries_a_call_may_have(fixed, per_query, expected, odd):
    """By what calls cost; those that are slow by chance do not count."""
    size = CallSize()
    for call in range(60):
        asked = size.get() if call % 3 else max(1, size.get() // 2)  # not always so many are waiting
        slow = {"first call": call == 0, "some calls": call % 7 == 0}.get(odd, False)
        size.add(asked, fixed + per_query * asked + 30 * slow)
    assert 0.9 * expected <= size.get() <= expected


def test_single_queries_do_not_tell_how_large_a_call_may_be():
    size = CallSize()
    for _ in range(40):
        size.add(1, 0.2)
    assert size.get() == 4


def test_a_retriever_that_answers_too_little_fails_and_keeps_nobody_waiting():
    class Short(SteppedRetriever):
        def search(self, queries, k):
            return []

    async def ask(owner):
        await Batcher(owner).search(["a", "b"], 1)

    owner = OwnerThread(lambda _: Short())
    with pytest.raises(ValueError, match="returned 0 answers to 2 queries"):
        asyncio.run(asyncio.wait_for(ask(owner), 600))
    owner.close()


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
        OwnerThread(make).ready.result(300)


@pytest.mark.slow
def test_what_clients_have_given_up_is_not_computed():
    """50 clients behind a slow call ask four times each: their last attempts alone are computed."""
    with_patience(last_attempts_alone_are_computed, 1.0, 10.0, 60.0)


def last_attempts_alone_are_computed(seconds: float) -> None:
    owner = OwnerThread(lambda _: SteppedRetriever())
    retriever = owner.ready.result()

    async def main(url: str):
        slow, client = (RetrieverClient([url], timeout=s, retries=3, backoff=0.01) for s in (3600, seconds))
        first = asyncio.create_task(slow.search(["slow"], 1))
        await counted(url, "batches", 1)
        others = [asyncio.create_task(client.search([f"q{number}"], 1)) for number in range(50)]
        await counted(url, "requests", 1 + 4 * 50)
        await counted(url, "dropped", 3 * 50)
        retriever.go_on.release(100)
        answers = await asyncio.gather(first, *others)
        counters = await counted(url, "requests", 0)
        await asyncio.gather(slow.close(), client.close())
        return [found[0].id for [found] in answers], counters

    with serving(owner) as url:
        answers, counters = asyncio.run(main(url))
    assert answers == ["slow", *(f"q{number}" for number in range(50))]
    assert (counters["requests"], counters["dropped"], counters["queries"]) == (201, 150, 51)
    assert sorted(query for queries, _ in retriever.calls for query in queries) == sorted(answers)


def test_a_query_does_not_wait_for_300_clients_that_have_hung_up():
    """Nothing of theirs is computed: the next query is in the next call."""
    owner = OwnerThread(lambda _: SteppedRetriever())
    retriever = owner.ready.result()

    async def main(url: str):
        client = RetrieverClient([url], timeout=60)
        first = asyncio.create_task(client.search(["slow"], 1))
        await counted(url, "batches", 1)
        body = json.dumps({"queries": ["gone"] * 20}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        address = url.removeprefix("http://").split(":")
        writers = [(await asyncio.open_connection(*address))[1] for _ in range(300)]
        for writer in writers:
            writer.write(head + body)
        await counted(url, "requests", 301)
        for writer in writers:
            writer.close()
        await counted(url, "dropped", 300)
        following = asyncio.create_task(client.search(["next"], 1))
        await counted(url, "requests", 302)
        retriever.go_on.release(2)
        await asyncio.gather(first, following)
        await client.close()

    with serving(owner) as url:
        asyncio.run(asyncio.wait_for(main(url), 600))
    assert [queries for queries, _ in retriever.calls] == [["slow"], ["next"]]


async def counted(url: str, name: str, least: int) -> dict:
    """The server's counters, when one of them has come so far."""
    async with aiohttp.ClientSession() as session:
        while (counters := await (await session.get(f"{url}/health")).json())[name] < least:
            await asyncio.sleep(0.01)
    return counters
