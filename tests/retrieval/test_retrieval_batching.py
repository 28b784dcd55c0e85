"""How waiting requests are merged, with a retriever whose pace the test sets."""

import asyncio
import threading

import pytest

from retrieval.batching import Batcher, OwnerThread


class SteppedRetriever:
    """Answers each query with itself; every call waits until the test lets it go on."""

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
        return [[({"id": query}, 1.0)] for query in queries]

    def close(self) -> None:
        self.threads.add(threading.get_ident())


def run(requests: list[tuple[list[str], int]], *, max_batch: int = 1024, cancel: int | None = None):
    """The first request is in flight when the others arrive."""
    owner = OwnerThread(SteppedRetriever)
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
    return [documents[0][0]["id"] for documents in answer]


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


def test_a_failure_reaches_those_who_asked_and_only_them():
    calls, answers, _ = run([(["a"], 1), (["bad"], 2), (["b"], 2), (["c"], 1)])
    assert ids(answers[0]) == ["a"] and ids(answers[3]) == ["c"] and len(calls) == 3
    assert [str(answer) for answer in answers[1:3]] == ["no index", "no index"]


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_client_that_has_gone_does_not_disturb_the_others(cancelled):
    _, answers, _ = run([(["a"], 1), (["b"], 2), (["c"], 1)], cancel=cancelled)
    assert isinstance(answers[cancelled], asyncio.CancelledError)
    rest = [ids(answer) for index, answer in enumerate(answers) if index != cancelled]
    assert rest == ([["b"], ["c"]] if cancelled == 0 else [["a"], ["c"]])


def test_a_retriever_that_cannot_be_made_says_why():
    def make():
        raise OSError("no such index")

    with pytest.raises(OSError, match="no such index"):
        OwnerThread(make).ready.result(5)
