"""A search whose pages a second model reads: local pages, a local model's endpoint, a local search service."""

import asyncio
import json

import pytest

from rollout.services.chat_client import ChatClient
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.tools.web.browse import (
    BrowsingSearch,
    final_information,
    passage,
)
from rollout.tools.web.page_fetcher import PageFetcher
from rollout.tools.web.web_search import BrightDataSearch
from rollout.trajectory import CallOutcome, Document, InfrastructureError, ToolResult
from tests.rollout.serving import response, serving, site


def reply(text):
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


class Found:
    """A search that found this, whatever it is asked."""

    name = "search"

    def __init__(self, result):
        self.result, self.closed = result, 0

    async def call(self, arguments):
        return self.result

    async def close(self):
        self.closed += 1


def browsing(search, answers, pages=None, **options):
    """The result, what the summariser was asked, and the paths of the pages that were fetched. ``search`` may need
    the address of the pages: it is called with it then."""

    async def main():
        async with serving(answers) as model, site(pages or {}) as (url, asked):
            tool = BrowsingSearch(
                search(url) if callable(search) else search,
                ChatClient([model.url], "m", retries=0),
                PageFetcher(allow_private_addresses=True),
                **options,
            )
            try:
                return await tool.call({"query": "where is Mira?"}), model.bodies, asked
            finally:
                await tool.close()

    return asyncio.run(main())


def hits(*documents):
    return lambda url: Found(
        ToolResult("text", CallOutcome.OK, tuple(Document(url + path, path, text, 1.0) for path, text in documents))
    )


def test_pages_are_read_and_summed_up():
    pages = {"/a": response("<p>Mira Voss was born in Grey Harbor."), "/b": response(b"%PDF", "application/pdf")}
    search = hits(("/a", "<b>Mira</b> Voss"), ("/b", "A study of potters."))
    result, [body], asked = browsing(search, [reply("They say ... **Final Information**\n\nGrey Harbor.\n")], pages)
    assert (result.text, result.outcome) == ("Grey Harbor.", CallOutcome.OK)
    assert [document.text for document in result.documents] == ["<b>Mira</b> Voss", "A study of potters."]
    assert "/b: not a text (application/pdf)" in result.detail and sorted(asked) == ["/a", "/b"]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.6, 0.95, 4096)
    [message] = body["messages"]
    shown = json.loads(message["content"][message["content"].index("[\n") : message["content"].rindex("]\n") + 1])
    assert [sorted(entry) for entry in shown] == [
        ["link", "passage", "snippet", "title"],
        ["error", "link", "snippet", "title"],
    ]
    assert shown[0]["snippet"] == "Mira Voss" and shown[0]["passage"] == "Mira Voss was born in Grey Harbor."
    assert "Search query: where is Mira?" in message["content"]


@pytest.mark.parametrize(
    ("text", "information"),
    [
        ("**Final Information**:\n\ny\nz\n", "y\nz"),
        ("**Final Information** first **Final Information** second", "second"),
        ("<think>**Final Information** draft</think>**Final Information** y", "y"),
        ("y", None),
        ("**Final Information** \n", None),
    ],
)
def test_what_stands_after_the_mark(text, information):
    assert final_information(text) == information


def test_a_summary_without_use_is_empty():
    def browse(text):
        return browsing(hits(("/a", "x")), [reply(text)], {"/a": response("x")})[0]

    result = browse("**Final Information** No helpful information found.")
    assert (result.outcome, result.detail) == (CallOutcome.EMPTY, None)
    result = browse("I cannot say.")
    assert (result.outcome, result.text) == (CallOutcome.EMPTY, "No helpful information found.")
    assert "no **Final Information**: 'I cannot say.'" in result.detail


@pytest.mark.parametrize("outcome", [CallOutcome.EMPTY, CallOutcome.ERROR, CallOutcome.REFUSED])
def test_other_results_of_the_search_come_back_as_they_are(outcome):
    found = ToolResult("text", outcome, (Document("http://127.0.0.1:1/", "", "x", 1.0),))
    assert browsing(Found(found), [reply("x")])[:2] == (found, [])


def test_a_summariser_that_fails_is_infrastructure():
    with pytest.raises(InfrastructureError, match="status 500: no memory"):
        browsing(hits(("/a", "x")), [(500, "no memory")], {"/a": response("x")})


def test_over_the_web_search_with_its_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIGHT_DATA_API_KEY", "k")
    cache = str(tmp_path / "cache.sqlite")
    client = ChatClient(["http://127.0.0.1:1"], "m")
    with pytest.raises(ValueError, match="expected needs_links: true"):
        BrowsingSearch(BrightDataSearch(cache=cache), client)

    async def page(request):
        return response("Mira lives in Oldfield.")

    async def main():
        async with site({"/a": page}) as (url, asked):
            organic = {"organic": [{"description": "Mira lives.", "link": url + "/a", "title": "A"}]}
            async with serving([organic]) as web_search, serving([reply("**Final Information** Oldfield")]) as model:
                search = BrightDataSearch(url=web_search.url, cache=cache, needs_links=True)
                summariser, fetcher = ChatClient([model.url], "m"), PageFetcher(allow_private_addresses=True)
                tool = LimitedTool(BrowsingSearch(search, summariser, fetcher), ToolLimits(timeout_s=30, retries=0))
                texts = [(await tool.call({"query": "Mira"})).text for _ in range(2)]
                await tool.close()
                return texts, len(web_search.bodies), len(model.bodies), asked

    assert asyncio.run(main()) == (["Oldfield"] * 2, 1, 2, ["/a"] * 2)


def test_a_search_without_its_key_is_told_at_the_start(monkeypatch, tmp_path):
    monkeypatch.delenv("BRIGHT_DATA_API_KEY", raising=False)

    def start(search):
        asyncio.run(LimitedTool(BrowsingSearch(search, ChatClient(["http://a"], "m")), ToolLimits()).start())

    with pytest.raises(ValueError, match="set the environment variable BRIGHT_DATA_API_KEY"):
        start(BrightDataSearch())
    start(BrightDataSearch(cache=str(tmp_path / "cache.sqlite"), needs_links=True, offline=True))
    start(Found(ToolResult("", CallOutcome.EMPTY)))  # has nothing to start


def test_closing_closes_the_search():
    search = Found(ToolResult("", CallOutcome.EMPTY))
    browsing(search, [reply("x")])
    assert search.closed == 1


def test_the_passage_is_around_the_sentence_most_like_the_snippet():
    filler = "Nothing of note happens in this place. "
    text = filler * 300 + "Mira Voss was born in Grey Harbor. " + "Mira Voss sings. " + filler * 300
    start = text.index("Mira Voss was")
    end = start + len("Mira Voss was born in Grey Harbor.")
    assert passage(text, "Mira Voss born Grey Harbor") == text[start - 3000 : end + 3000]
    assert passage(text[start:], "Mira Voss born Grey Harbor", reach=5) == text[start : end + 5]
    assert passage(text, "quite other words") == text[:6000]
    # 1 common word of 5 + 5: exactly 0.2, which is not enough
    assert passage("x y z u v " * 700, "x a b c d") == ("x y z u v " * 700)[:6000]
    assert passage("a. x y z u v. b.", "x a2 b2 c2", reach=0) == "x y z u v."  # 2 / 9
