"""The client against real servers: ours, and small ones that are down, slow, or answer nonsense."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from retrieval.client import RetrieverClient
from retrieval.types import Document, RetrievalError
from tests.processes import with_patience

GOOD = {"result": [[{"document": {"id": "7", "title": "T", "text": "x", "contents": '"T"\nx'}, "score": 1.5}]]}
DOCUMENT = Document("7", "T", "x", 1.5)


@asynccontextmanager
async def serving(*answers, delay: float = 0.0):
    """A server that gives these answers in turn, the last one for ever: a body for status 200, or (status, body)."""
    asked, closing = [], asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if delay:
            await asyncio.wait([asyncio.create_task(closing.wait())], timeout=delay)
        answer = answers[min(len(asked), len(answers)) - 1]
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    app = web.Application()
    app.router.add_post("/retrieve", handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", asked
    finally:
        closing.set()
        await runner.cleanup()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def ask(urls: list[str], *, times: int = 1, queries=("q",), **options) -> list:
    client = RetrieverClient(urls, **({"backoff": 0.01} | options))
    try:
        return [await client.search(list(queries), 2) for _ in range(times)]
    finally:
        await client.close()


def test_answers_of_our_server(server, corpus):
    async def main():
        client = RetrieverClient([server.url + "/retrieve"], max_connections=4)
        many = await asyncio.gather(*(client.search([word, "zzzz"], 2) for word in corpus.words[:40]))
        assert await client.search([], 2) == []
        assert len((await client.search(["half \ud83d pair " + corpus.words[0]], 2))[0]) == 2
        await client.close()
        again = await client.search([corpus.words[0]], 2)  # closed clients open again
        await client.close()
        return many, again

    many, again = asyncio.run(main())
    for word, (found, nothing) in zip(corpus.words, many, strict=False):
        assert nothing == [] and 0 < len(found) <= 2
        for document in found:
            assert document.contents == corpus.contents[corpus.ids.index(document.id)]
            assert word in document.contents.lower()
    assert again == [many[0][0]]


def test_answers_of_search_r1s_server():
    """Its BM25 server sends no id."""
    answer = {"result": [[{"document": {"title": "T", "text": "x", "contents": '"T"\nx'}, "score": 2}], []]}

    async def main():
        async with serving(answer) as (url, asked):
            found = await ask([url], queries=("a", "b"))
            return found, asked

    found, asked = asyncio.run(main())
    assert found == [[[Document("", "T", "x", 2.0)], []]]
    assert asked == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]


def test_ids_of_other_servers_may_be_numbers_or_null():
    hits = [{"document": {"id": id_, "contents": '"T"\nx'}, "score": 2} for id_ in (7, None)]

    async def main():
        async with serving({"result": [hits]}) as (url, _):
            return await ask([url], queries=("a",))

    assert asyncio.run(main()) == [[[Document("7", "T", "x", 2.0), Document("", "T", "x", 2.0)]]]


@pytest.mark.parametrize(
    "nonsense",
    [
        "<html>proxy error</html>",
        {},
        {"result": [[], []]},
        {"result": [GOOD["result"][0] * 3]},
        {"result": [[{"document": "text", "score": 1.0}]]},
        {"result": [[{"document": {"id": True, "contents": "a\nb"}, "score": 1.0}]]},
        {"result": [[{"document": {"id": "7", "contents": None}, "score": 1.0}]]},
        {"result": [[{"document": {"id": "7", "contents": "a\nb"}, "score": "high"}]]},
        '{"result": [[{"document": {"id": "7", "contents": "a\\nb"}, "score": 1e999}]]}',
        (500, "crashed"),
        (302, "elsewhere"),
    ],
)
def test_nonsense_is_tried_again_and_then_told(nonsense):
    async def main():
        async with serving(nonsense) as (url, asked):
            with pytest.raises(RetrievalError, match="no answer from the retriever after 3 attempts"):
                await ask([url], retries=2)
            assert len(asked) == 3
        async with serving(nonsense, GOOD) as (url, asked):
            assert await ask([url], retries=1) == [[[DOCUMENT]]] and len(asked) == 2

    asyncio.run(main())


def test_a_rejected_request_is_not_repeated():
    async def main():
        async with serving((422, "queries: wrong")) as (url, asked):
            with pytest.raises(RetrievalError, match="rejected the request: status 422: queries: wrong"):
                await ask([url])
            assert len(asked) == 1
        async with serving((429, "busy"), GOOD) as (url, asked):  # but "later" means later
            assert await ask([url]) == [[[DOCUMENT]]]

    asyncio.run(main())


def test_a_server_that_is_down():
    started = time.monotonic()
    with pytest.raises(RetrievalError, match="after 3 attempts .*Connect"):
        asyncio.run(ask([f"http://127.0.0.1:{free_port()}"], retries=2, backoff=0.1))
    assert 0.15 <= time.monotonic() - started  # pauses of 0.1 and 0.2 s, times 0.5 to 1.5


def test_a_slow_server():
    async def main(seconds):
        async with serving(GOOD, delay=36000.0) as (url, asked):
            with pytest.raises(RetrievalError, match=f"no answer within {seconds:g} s"):
                await ask([url], timeout=seconds, retries=1)
            assert len(asked) == 2

    with_patience(lambda seconds: asyncio.run(main(seconds)), 0.1, 2.0, 30.0)


def test_waiting_for_a_connection_is_not_held_against_the_server():
    async def main(seconds):
        async with serving(GOOD, delay=seconds / 6) as (url, _):
            client = RetrieverClient([url], timeout=seconds, retries=0, max_connections=1)
            found = (client.search(["q"], 2) for _ in range(8))  # longer than the deadline in all
            assert await asyncio.gather(*found) == [[[DOCUMENT]]] * 8
            await client.close()

    with_patience(lambda seconds: asyncio.run(main(seconds)), 0.6, 6.0, 60.0)


LOADING = (503, {"status": "loading", "detail": "3 of 65 GB"})


def test_a_server_that_is_loading_is_waited_for(monkeypatch, caplog):
    """Without an attempt: there is one alone. Another server that is ready is asked at once."""

    async def main():
        monkeypatch.setattr("retrieval.client.LOADING_PAUSE_S", 0.01)
        async with serving(*[LOADING] * 3, GOOD, (503, "busy")) as (url, asked):
            client = RetrieverClient([url], retries=0)
            assert await client.search(["q"], 2) == [[DOCUMENT]] and len(asked) == 4
            with pytest.raises(RetrievalError, match="after 1 attempts .*status 503: busy"):
                await client.search(["q"], 2)
            await client.close()
        async with serving(LOADING) as (url, _):
            with pytest.raises(RetrievalError, match=r"still loading after 0\.05 s \(3 of 65 GB\)"):
                await ask([url], loading_timeout=0.05)
        told = [record.getMessage() for record in caplog.records if record.name == "retrieval.client"]
        assert len(told) == 2 and "which is loading: 3 of 65 GB" in told[0]  # once for each server
        monkeypatch.setattr("retrieval.client.LOADING_PAUSE_S", 1000)
        async with serving(LOADING) as (first, _), serving(GOOD) as (second, _):
            assert await ask([first, second], retries=0) == [[[DOCUMENT]]]

    asyncio.run(main())


def test_servers_share_the_work_and_stand_in_for_each_other():
    async def main():
        async with serving(GOOD) as (first, asked_first), serving(GOOD) as (second, asked_second):
            await ask([first, second], times=6)
            assert (len(asked_first), len(asked_second)) == (3, 3)
            down = f"http://127.0.0.1:{free_port()}"
            assert await ask([down, first], times=4, retries=1) == [[[DOCUMENT]]] * 4

    asyncio.run(main())


def test_the_start_searches_once_at_every_server_until_it_is_closed():
    async def main():
        async with serving(GOOD) as (first, asked_first), serving((503, "busy"), GOOD) as (second, asked_second):
            client = RetrieverClient([first, second], backoff=0.01)
            for _ in range(2):
                await client.start()
            assert asked_first == [{"queries": ["test"], "topk": 1, "return_scores": True}] and len(asked_second) == 2
            await client.close()
            await client.start()
            await client.close()
            assert (len(asked_first), len(asked_second)) == (2, 3)
            down = f"http://127.0.0.1:{free_port()}"  # its work would be done twice by the other, all along
            for wrong in (down, first + "/v1"):
                client = RetrieverClient([first, wrong], backoff=0.01)
                with pytest.raises(RetrievalError, match=wrong):
                    await client.start()
                await client.close()

    asyncio.run(main())


def test_one_loop_after_another_but_not_two_at_once():
    async def main():
        async with serving(GOOD) as (url, _):
            client = RetrieverClient([url])
            await client.search(["q"], 2)
            with pytest.raises(RuntimeError, match="one event loop at a time"):
                await asyncio.to_thread(lambda: asyncio.run(client.search(["q"], 2)))
            await client.close()
            await asyncio.to_thread(lambda: asyncio.run(client.search(["q"], 2)))

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"urls": []},
        {"urls": ["localhost:8000"]},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        RetrieverClient(**({"urls": ["http://a"]} | options))


def test_a_server_that_comes_back_elsewhere_is_found(tmp_path):
    """The file is read for every attempt: while the first server answers, after it has gone, and from the start."""
    announced = tmp_path / "search.url"

    async def main():
        client = RetrieverClient([f"file:{announced}"], backoff=0.01, retries=2)
        with pytest.raises(RetrievalError, match="search.url"):
            await client.search(["q"], 2)
        async with serving(GOOD) as (first, _):
            announced.write_text(first)
            await client.search(["q"], 2)
        async with serving(GOOD) as (second, asked):
            assert second != first
            announced.write_text(second + "\n")
            found = await client.search(["q"], 2)
            await client.close()
            return found, asked

    found, asked = asyncio.run(main())
    assert len(found[0]) == 1 and len(asked) == 1
