"""Web search through Bright Data's SERP API, as in ARPO's training and evaluation
(verl/workers/rollout/tools/search_tool.py of RUC-NLPIR/ARPO)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any
from urllib.parse import urlencode

from common.ranges import PositiveFloat, PositiveInt
from common.sessions import LoopSession
from common.text import whole
from rollout.services.http_client import NOT_ALLOWED, Answer, ApiKey, post_json
from rollout.tools.limits import SharedCache
from rollout.tools.search import query_of
from rollout.tools.web.search_cache import SearchCache, SearchCacheError, cache_key
from rollout.trajectory import CallOutcome, Document, InfrastructureError, PermanentFailure, ToolResult

logger = logging.getLogger(__name__)

NOTHING_FOUND = "No search results found."  # as published, also in their cache file
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
SHOWS_LANGUAGE = 1000  # first characters of a query
_HAN_PER_WORD = 2  # most words of modern Chinese have two characters


class BrightDataSearch:
    """Searches the web through Bright Data. Takes ``{"query": str}`` and returns a line "Page i: ..." per hit: the
    distinct, non-empty descriptions in Bing's order.

    The hits are also documents: the id is the link, the text the description, the score 1 / rank. Chinese queries
    are searched in Chinese, others in English. Equal queries at the same time share one request.

    Outcomes: OK; EMPTY without hits; REFUSED for an empty query, ERROR for a missing one, as in ``SearchTool``. Other
    failures (another status than 200, no answer, no JSON) raise InfrastructureError, and a ``LimitedTool`` retries.
    Status 401 and 403 raise PermanentFailure, which is not retried. If the cache cannot store a paid result, the result
    is still returned and a warning is logged.

    Args:
        zone: a SERP zone of the Bright Data account. A Web Unlocker zone gets status 403 or failed searches.
        api_key_variable: name of the environment variable that holds the key.
        location: country of the searcher, two letters.
        max_results: hits shown.
        result_length: characters of each description shown.
        timeout: seconds for one request.
        cache: an SQLite file (see ``search_cache``) for results of this and later runs, keyed by query alone, as
            published. A file with another ``location``, ``max_results`` or ``result_length`` is refused.
        needs_links: search again if the cache has a result without links (imported results), for ``BrowsingSearch``.
        offline: answer from the cache only, without a key or requests. A query that the cache lacks is EMPTY, in the
            words of a search without hits; ``detail`` says which it was. Results without links are returned without
            them.
        url: address of the service.

    Raises:
        ValueError: an impossible option, on construction; no key, at ``start``.
        SearchCacheError: on construction, if the cache cannot be used.
    """

    name = "search"

    def __init__(
        self,
        zone: str = "serp_api1",
        api_key_variable: str = "BRIGHT_DATA_API_KEY",
        location: str = "cn",
        max_results: PositiveInt = 10,
        result_length: PositiveInt = 1000,
        timeout: PositiveFloat = 60.0,
        cache: str | None = None,
        needs_links: bool = False,
        offline: bool = False,
        url: str = "https://api.brightdata.com/request",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; expected http://... or https://...")
        if offline and cache is None:
            raise ValueError("offline is true, so only a cache could answer; expected a file as cache, found none")
        self.zone, self.location, self.url, self.timeout = zone, location, url, timeout
        self.max_results, self.result_length, self.needs_links = max_results, result_length, needs_links
        self.offline = offline
        self.key = ApiKey(api_key_variable, "Bright Data's search")
        shapes_results = {"location": location, "max_results": max_results, "result_length": result_length}
        self.cache = None if cache is None else SearchCache(cache, shapes_results)
        self._told: set[str] = set()  # logged failures of the cache
        self._session = LoopSession("BrightDataSearch")
        self._running = SharedCache(0)

    async def start(self) -> None:
        """Check that the API key is set. Raises ValueError without a key (unless offline), because the cache will lack
        some query."""
        if self.offline:
            return
        try:
            self.key.headers()
        except ValueError as error:
            raise ValueError(f"{error}. To search in the cache alone, set the tool's offline to true") from None

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        query = query_of(arguments, cache_key)
        return query if isinstance(query, ToolResult) else await self._running.get(query, lambda: self._search(query))

    async def _search(self, query: str) -> ToolResult:
        if self.cache is not None:
            known = await asyncio.to_thread(self.cache.lookup, query)
            if known is not None and (self.offline or not self.needs_links or known.documents is not None):
                return _as_result(known.text, known.documents or ())
        if self.offline:
            return ToolResult(NOTHING_FOUND, CallOutcome.EMPTY, detail="offline, and the cache lacks this query")
        documents = await self._ask(query)
        text = format_pages(documents)
        if self.cache is not None:
            await self._keep(self.cache, query, text, documents)
        return _as_result(text, documents)

    async def _keep(self, cache: SearchCache, query: str, text: str, documents: tuple[Document, ...]) -> None:
        try:
            await asyncio.to_thread(cache.store, query, text, documents)
        except SearchCacheError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("search results are not kept, and will be paid for again: %s", error)

    async def _ask(self, query: str) -> tuple[Document, ...]:
        payload = {"zone": self.zone, "url": bing_url(query, self.location), "format": "raw"}
        session, _ = self._session.open()
        answer = await post_json(session, self.url, payload, self.key, self.timeout)
        if answer.status != 200:
            kind = PermanentFailure if answer.status in NOT_ALLOWED else InfrastructureError
            raise kind(self._explain(answer))
        try:
            return parse_organic(answer.body, self.max_results, self.result_length)
        except ValueError as error:  # the excerpt has lost the key before it was cut
            failure = f"{self.url}: {error}; found {answer.excerpt}{_said_in_headers(answer)}"
        raise InfrastructureError(failure)  # not chained: json's error holds the body, which may hold the key

    def _explain(self, answer: Answer) -> str:
        message = f"{self.url}: status {answer.status}: {answer.excerpt}{_said_in_headers(answer)}"
        if answer.status in NOT_ALLOWED:
            message += (
                f". Likely causes: the zone {self.zone!r} is a Web Unlocker zone and not a SERP zone, or the key in "
                f"{self.key.variable} is not valid for it"
            )
        return message

    async def close(self) -> None:
        """Close the HTTP connections; a later call opens new ones."""
        await self._session.close()


def _as_result(text: str, documents: tuple[Document, ...]) -> ToolResult:
    return ToolResult(text, CallOutcome.EMPTY if text == NOTHING_FOUND else CallOutcome.OK, documents)


def _said_in_headers(answer: Answer) -> str:
    """Return Bright Data's explanation of a failure, from the headers of its answer (docs.brightdata.com, "Debugging
    SERP API")."""
    said = [v for k, v in answer.headers.items() if k.lower() in ("x-brd-error", "x-brd-error-code")]
    return f" ({'; '.join(said)})" if said else ""


def is_chinese(query: str) -> bool:
    """Return whether at least half of a query's words are Chinese, at two Han characters a word; False with Kana or
    Hangul.

    The published code uses a language identifier; scripts are enough for these two languages.
    """
    query = query[:SHOWS_LANGUAGE]
    if _KANA_OR_HANGUL.search(query):
        return False
    han = len(_HAN.findall(query))
    others = len([word for word in _HAN.sub(" ", query).split() if any(map(str.isalpha, word))])
    return han > 0 and han / _HAN_PER_WORD >= others


def bing_url(query: str, location: str) -> str:
    market, language = ("zh-CN", "zh") if is_chinese(query) else ("en-US", "en")
    asked = {"q": query, "mkt": market, "setLang": language, "brd_json": 1, "cc": location}
    return "https://www.bing.com/search?" + urlencode(asked)


def parse_organic(body: str, max_results: int, result_length: int) -> tuple[Document, ...]:
    """Return the hits in a search service's answer ``{"general": ..., "organic": [{"description", "title", "link",
    ...}, ...]}`` as documents; a page without hits may have no "organic". Raises ValueError for any other shape,
    without quoting the body, which may hold the key."""
    try:
        page = whole(json.loads(body))
    except ValueError:
        raise ValueError("expected JSON") from None
    if not isinstance(page, dict) or not ("organic" in page or "general" in page):
        raise ValueError('expected {"general": ..., "organic": [...]}')
    hits = page.get("organic") or []
    if not isinstance(hits, list) or not all(isinstance(hit, dict) for hit in hits):
        raise ValueError('expected a list of objects as "organic"')
    distinct: dict[str, dict[str, Any]] = {}
    for hit in hits:
        description = hit.get("description")
        if isinstance(description, str) and description.strip():
            distinct.setdefault(description, hit)
    return tuple(
        Document(_text(hit.get("link")), _text(hit.get("title")), description[:result_length], 1 / rank)
        for rank, (description, hit) in enumerate(list(distinct.items())[:max_results], start=1)
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def format_pages(documents: tuple[Document, ...]) -> str:
    """Return search hits as one text, as the published tool shows them.

    >>> format_pages((Document("", "", "A potter.", 1.0), Document("", "", "A harbor.", 0.5)))
    'Page 1: A potter.\\nPage 2: A harbor.'
    """
    return "\n".join(f"Page {i}: {d.text}" for i, d in enumerate(documents, start=1)) or NOTHING_FOUND
