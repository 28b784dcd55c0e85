"""Bright Data's search against a local server of the same shape: what is asked, shown, kept, and told on failure."""

import asyncio
import logging
import sqlite3
import traceback
from urllib.parse import parse_qs, urlsplit

import pytest

from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.tools.web.search_cache import SearchCache
from rollout.tools.web.web_search import BrightDataSearch, bing_url, is_chinese
from rollout.trajectory import CallOutcome, Document, InfrastructureError, PermanentFailure
from tests.rollout.serving import raw_server, serving

KEY = "k3y-of-these-tests"


def hit(description, link="https://e.org", title="T"):
    return {"description": description, "link": link, "title": title, "rank": 1, "global_rank": 7}


PAGE = {
    "general": {"search_engine": "bing"},
    "organic": [hit("A potter.", "https://e.org/1"), hit(""), hit("A potter.", "https://e.org/2"), hit("A harbor.")],
}
SHOWN = "Page 1: A potter.\nPage 2: A harbor."


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("BRIGHT_DATA_API_KEY", KEY)


def using(answer, use, **options):
    """Run ``await use(tool, served)`` with a tool that asks a local server."""

    async def main():
        async with serving(answer) as served:
            tool = BrightDataSearch(**({"url": served.url + "/request"} | options))
            try:
                return await use(tool, served)
            finally:
                await tool.close()

    return asyncio.run(main())


def search(answer, query="who is Mira", **options):
    return using(answer, lambda tool, served: tool.call({"query": query}), **options)


def test_what_is_asked_and_shown():
    async def use(tool, served):
        return await tool.call({"query": 'who is "Mira Voss" & co'}), served

    result, served = using([PAGE], use, location="us")
    assert (result.text, result.outcome) == (SHOWN, CallOutcome.OK)
    assert result.documents == (
        Document("https://e.org/1", "T", "A potter.", 1.0),
        Document("https://e.org", "T", "A harbor.", 0.5),
    )
    [body], [headers] = served.bodies, served.headers
    assert headers["Authorization"] == f"Bearer {KEY}"
    asked = urlsplit(body.pop("url"))
    assert body == {"zone": "serp_api1", "format": "raw"}
    assert (asked.scheme, asked.netloc, asked.path) == ("https", "www.bing.com", "/search")
    assert parse_qs(asked.query) == {
        "q": ["who is Mira Voss & co"],
        "mkt": ["en-US"],
        "setLang": ["en"],
        "brd_json": ["1"],
        "cc": ["us"],
    }


@pytest.mark.parametrize("page", [{"organic": []}, {"general": {}}, {"general": {}, "organic": None}])
def test_nothing_found(page):
    result = search([page])
    assert (result.text, result.outcome, result.documents) == ("No search results found.", CallOutcome.EMPTY, ())


@pytest.mark.parametrize(
    ("query", "chinese"),
    [
        ("红楼梦的作者是谁", True),
        ("iPhone 15 价格", True),
        ("meaning of the word 红楼梦 in English", False),
        ("東京タワーの高さ", False),
        ("서울 인구", False),
    ],
)
def test_languages(query, chinese):
    assert is_chinese(query) is chinese
    asked = parse_qs(urlsplit(bing_url(query, "cn")).query)
    assert (asked["mkt"], asked["setLang"]) == ((["zh-CN"], ["zh"]) if chinese else (["en-US"], ["en"]))
    assert asked["q"] == [query] and asked["cc"] == ["cn"]


def test_queries_that_are_not_sent():
    async def use(tool, served):
        results = [await tool.call(arguments) for arguments in ({}, {"query": 3}, {"query": " "}, {"query": '""'})]
        return [result.outcome for result in results], served.bodies

    error, refused = CallOutcome.ERROR, CallOutcome.REFUSED
    assert using([PAGE], use) == ([error, error, refused, refused], [])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, "down"), "status 500: down"),
        ((403, "Forbidden"), "Likely causes: the zone 'serp_api1' is a Web Unlocker zone and not a SERP zone"),
        ("<html>captcha</html>", "expected JSON; found <html>captcha"),
        ([], "expected"),
        ({"organic": "none"}, "list of objects"),
    ],
)
def test_failures_of_the_service(answer, message):
    with pytest.raises(InfrastructureError, match=message) as failure:
        search([answer])
    assert "127.0.0.1" in str(failure.value)
    assert isinstance(failure.value, PermanentFailure) == (isinstance(answer, tuple) and answer[0] in (401, 403))


def test_limits_around_it_try_again():
    async def use(tool, served):
        limited = LimitedTool(tool, ToolLimits(retries=2, backoff_s=0))
        return (await limited.call({"query": "q"})).text, len(served.bodies)

    assert using([(429, "slow down"), "nonsense", PAGE], use) == (SHOWN, 3)


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_not_accepted_is_not_tried_again(status):
    async def use(tool, served):
        with pytest.raises(PermanentFailure, match=f"status {status}"):
            await LimitedTool(tool, ToolLimits(retries=2, backoff_s=0)).call({"query": "q"})
        return len(served.bodies)

    assert using([(status, "no"), PAGE], use) == 1


@pytest.mark.parametrize("place", [60, 70, 78, 285, 292])
@pytest.mark.parametrize("shape", ["{}", '["{}"]', '{{"error": "{}"}}', '{{"organic": ["{}"]}}'])
def test_no_part_of_an_echoed_key_is_told_wherever_the_message_is_cut(place, shape):
    with pytest.raises(InfrastructureError, match="expected") as failure:
        search([shape.format("x" * (place - 8) + f" Bearer {KEY}")])
    assert KEY[:3] not in "".join(traceback.format_exception(failure.value))


def test_the_key_is_told_to_nobody_else(tmp_path, caplog):
    """Not even by a server that repeats it, by a chained error, or by a file that the tool writes."""
    caplog.set_level(logging.DEBUG)
    errors = []

    async def broken(content):
        async with raw_server(content) as url:
            tool = BrightDataSearch(url=url)
            try:
                await tool.call({"query": "q"})
            finally:
                await tool.close()

    for status in (200, 401, 500):
        with pytest.raises(InfrastructureError) as failure:
            search([(status, f"bad token Bearer {KEY}", {"x-brd-error": KEY})])
        assert "***" in str(failure.value)
        errors.append(failure.value)
    ok = b"HTTP/1.1 200 OK\r\n"
    for content in (ok + b"no header\r\n\r\n", b"nonsense", b"", ok + b"Content-Length: 9\r\n\r\nx"):
        with pytest.raises(InfrastructureError) as failure:
            asyncio.run(broken(content))
        errors.append(failure.value)
    while errors:
        error = errors.pop()
        assert KEY not in repr(error) + str(error) + "".join(traceback.format_exception(error))
        errors += [e for e in (error.__cause__, error.__context__) if e is not None]
    assert KEY not in caplog.text

    async def use(tool, served):
        await tool.call({"query": "q"})
        return repr(vars(tool)) + repr(tool) + repr(tool.key) + repr(vars(tool.key))

    assert KEY not in using([PAGE], use, cache=str(tmp_path / "cache.sqlite"))
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_missing_key(monkeypatch, tmp_path):
    monkeypatch.delenv("BRIGHT_DATA_API_KEY")
    path = str(tmp_path / "cache.sqlite")
    for tool in (BrightDataSearch(), BrightDataSearch(cache=path)):  # no cache knows all that a policy may ask
        with pytest.raises(ValueError, match="set the environment variable BRIGHT_DATA_API_KEY.* offline to true"):
            asyncio.run(LimitedTool(tool, ToolLimits()).start())
    monkeypatch.setenv("OTHER_KEY", "two words\n")
    with pytest.raises(ValueError, match="OTHER_KEY does not hold a key"):
        asyncio.run(BrightDataSearch(api_key_variable="OTHER_KEY").start())
    with pytest.raises(ValueError, match="expected the NAME of an environment variable") as refused:
        BrightDataSearch(api_key_variable=KEY)  # the key itself in the place of its name
    assert KEY not in str(refused.value)
    monkeypatch.setenv("OTHER_KEY", KEY)
    asyncio.run(BrightDataSearch(api_key_variable="OTHER_KEY").start())


@pytest.mark.parametrize("needs_links", [False, True])
def test_offline_the_cache_alone_answers(needs_links, monkeypatch, tmp_path):
    monkeypatch.delenv("BRIGHT_DATA_API_KEY")
    path = str(tmp_path / "cache.sqlite")
    linked = Document("https://e.org/1", "T", "y", 1.0)
    for query, text, documents in (("imported", "Page 1: x", None), ("ours", "Page 1: y", [linked])):
        SearchCache(path).store(query, text, documents)

    async def use(tool, served):
        await tool.start()
        results = [await tool.call({"query": query}) for query in ('"imported"', "ours", "unknown")]
        return [(r.text, r.outcome, r.documents, r.detail) for r in results], served.bodies

    missing = "offline, and the cache lacks this query"
    assert using([PAGE], use, cache=path, offline=True, needs_links=needs_links) == (
        [
            ("Page 1: x", CallOutcome.OK, (), None),
            ("Page 1: y", CallOutcome.OK, (linked,), None),
            ("No search results found.", CallOutcome.EMPTY, (), missing),
        ],
        [],
    )
    assert SearchCache(path).count() == 2  # what is missing is not kept as a search without hits
    with pytest.raises(ValueError, match="expected a file as cache"):
        BrightDataSearch(offline=True)


def test_what_was_paid_for_is_returned_when_the_cache_cannot_take_it(tmp_path, caplog, monkeypatch):
    """The file becomes read-only, as on a full disk: reading goes on, writing fails."""
    connect = sqlite3.connect

    def read_only(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA query_only = ON")
        return connection

    async def use(tool, served):
        assert (await tool.call({"query": "before"})).text == SHOWN
        monkeypatch.setattr(sqlite3, "connect", read_only)
        limited = LimitedTool(tool, ToolLimits(retries=2, backoff_s=0))
        texts = [(await limited.call({"query": query})).text for query in ("a", "b", "before")]
        return texts, len(served.bodies), tool.cache.count()

    assert using([PAGE], use, cache=str(tmp_path / "cache.sqlite")) == ([SHOWN] * 3, 3, 1)
    [told] = [record.getMessage() for record in caplog.records if record.name == "rollout.tools.web.web_search"]
    assert "cache.sqlite: attempt to write a readonly database" in told and "not kept" in told


def test_the_cache_outlives_the_tool_and_keeps_no_failures(tmp_path):
    path = str(tmp_path / "cache.sqlite")

    async def use(tool, served):
        for query in ("fails", "works", '"works"', "nothing"):
            try:
                await tool.call({"query": query})
            except InfrastructureError as error:
                assert "down" in str(error)
        return len(served.bodies)

    assert using([(500, "down"), PAGE, {"organic": []}], use, cache=path) == 3

    async def again(tool, served):
        results = [await tool.call({"query": query}) for query in ("works", "nothing", "fails")]
        assert [result.text for result in results] == [SHOWN, "No search results found.", "Page 1: later"]
        assert [result.outcome for result in results] == [CallOutcome.OK, CallOutcome.EMPTY, CallOutcome.OK]
        assert results[0].documents[0].id == "https://e.org/1"
        return len(served.bodies)

    assert using([{"organic": [hit("later")]}], again, cache=path) == 1


def test_imported_results_have_no_links_and_are_asked_again_when_links_are_needed(tmp_path):
    path = str(tmp_path / "cache.sqlite")
    SearchCache(path).store("q", "Page 1: imported")

    async def use(tool, served):
        return [(await tool.call({"query": "q"})).text for _ in range(2)], len(served.bodies)

    assert using([PAGE], use, cache=path) == (["Page 1: imported"] * 2, 0)
    assert using([PAGE], use, cache=path, needs_links=True) == ([SHOWN] * 2, 1)


@pytest.mark.parametrize("cached", [False, True])
def test_equal_queries_at_once_share_one_request(cached, tmp_path):
    release = asyncio.Event()

    async def slow(body):
        await release.wait()
        return PAGE

    async def use(tool, served):
        calls = [asyncio.create_task(tool.call({"query": query})) for query in ("a", '"a"', "b", "a")]
        while len(served.bodies) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        release.set()
        results = await asyncio.gather(*calls)
        return [result.text for result in results], len(served.bodies)

    cache = str(tmp_path / "cache.sqlite") if cached else None
    assert using(slow, use, cache=cache) == ([SHOWN] * 4, 2)
