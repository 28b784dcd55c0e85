"""The client of a retrieval server: pooled connections, deadlines, retries, several servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.secret import authorization
from common.text import whole
from retrieval.types import LOADING, Document, RetrievalError, split_contents

LOADING_TIMEOUT_S = 1800.0  # seconds for a server to load
LOADING_PAUSE_S = 2.0  # seconds until one that is loading is asked again
FILE_PREFIX = "file:"
_JITTER = random.Random()  # of its own: a pause must not move the seeded generators of a run
logger = logging.getLogger(__name__)


class RetrieverClient:
    """Asks one of several equal servers (Search-R1's contract, see ``retrieval.server``).

    Requests go round robin. A server that is down, slow, or answers nonsense (another status than 200, no JSON, wrong
    shape) is tried again at the next URL after a pause of ``backoff * 2**attempt`` seconds, times a random factor
    between 0.5 and 1.5 so that many clients do not come back at once.  A request that the server rejects as wrong
    (status 4xx, but for 408 and 429) is not repeated.  A server that says that it is loading is waited for: this is no
    attempt, and no part of ``timeout``. A server that wants a secret gets the environment's (``common.secret``).

    Use it from one event loop at a time; a new loop gets new connections.

    An address may also be ``file:PATH``: the URL is what stands in that file, which the server writes when it listens
    (``--announce``). It is read again after a failed attempt, so that a server that comes back elsewhere is found, by
    a running run and by one that is continued.

    Args:
        urls: such as ``["http://127.0.0.1:8000"]``, with or without ``/retrieve``, or ``["file:outputs/search.url"]``.
        timeout: seconds for one attempt, waiting for a free connection not counted.
        retries: further attempts after the first.
        backoff: seconds before the first retry.
        max_connections: requests in flight at once.
        loading_timeout: seconds that one search waits for servers that are loading.
    """

    def __init__(
        self,
        urls: list[str],
        timeout: PositiveFloat = 10,
        retries: NonNegativeInt = 3,
        backoff: NonNegativeFloat = 0.2,
        max_connections: PositiveInt = 64,
        loading_timeout: PositiveFloat = LOADING_TIMEOUT_S,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://", FILE_PREFIX)) for url in urls):
            raise ValueError(f'urls: expected at least one "http://host:port" or "file:PATH"; found {urls}')
        if timeout <= 0 or retries < 0 or backoff < 0 or max_connections < 1 or loading_timeout <= 0:
            raise ValueError(
                "expected timeout > 0, retries >= 0, backoff >= 0, max_connections >= 1, loading_timeout > 0; found "
                f"{timeout}, {retries}, {backoff}, {max_connections}, {loading_timeout}"
            )
        self.urls = [url if url.startswith(FILE_PREFIX) else _endpoint(url) for url in urls]
        self.timeout, self.retries, self.backoff, self.max_connections = timeout, retries, backoff, max_connections
        self.loading_timeout = loading_timeout
        self._told_loading: set[str] = set()
        self._next_url = itertools.cycle(self.urls)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Semaphore | None = None
        self._tried = False

    async def start(self) -> None:
        """Search once at every server, the first time; RetrievalError unless all answer. So a wrong address is
        reported before anything else has been started."""
        if not self._tried:
            await asyncio.gather(*(self._search(["test"], 1, itertools.repeat(url)) for url in set(self.urls)))
            self._tried = True

    async def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """For each query at most ``k`` documents, best first; an empty list when nothing matches.

        Raises RetrievalError when no attempt brought a valid answer; ValueError for ``k`` < 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1; found {k}")
        return await self._search(queries, k, self._next_url) if queries else []

    async def _search(self, queries: list[str], k: int, urls: Iterator[str]) -> list[list[Document]]:
        texts = [query.encode("utf-8", "replace").decode("utf-8") for query in queries]
        body = orjson.dumps({"queries": texts, "topk": k, "return_scores": True})
        failures: list[str] = []
        loading, loading_since = 0, 0.0  # answers "loading" so far
        while len(failures) <= self.retries:
            address = url = next(urls)
            try:
                url = _endpoint(current_url(address))
                content = await self._post(url, body)
                self._told_loading.discard(url)
                return parse_answer(content, len(queries), k)
            except _Loading as error:
                loading_since = loading_since or time.monotonic()
                if time.monotonic() - loading_since > self.loading_timeout:
                    raise RetrievalError(
                        f"{url} is still loading after {self.loading_timeout:g} s ({error}); wait until it says "
                        "that it is ready, or raise loading_timeout"
                    ) from error
                if url not in self._told_loading:
                    self._told_loading.add(url)
                    logger.warning("waiting for the retriever at %s, which is loading: %s", url, error)
                loading += 1
                if loading % len(self.urls) == 0:  # the others may be ready
                    await asyncio.sleep(LOADING_PAUSE_S * _JITTER.uniform(0.5, 1.5))
                continue
            except _Rejected as error:
                raise RetrievalError(f"{url} rejected the request: {error}") from error
            except TimeoutError:
                failures.append(f"{url}: no answer within {self.timeout:g} s")
            except (aiohttp.ClientError, OSError, _Nonsense) as error:
                failures.append(f"{url}: {type(error).__name__.strip('_')}: {error}")
            if len(failures) <= self.retries:
                await asyncio.sleep(self.backoff * 2 ** (len(failures) - 1) * _JITTER.uniform(0.5, 1.5))
        raise RetrievalError(
            f"no answer from the retriever after {len(failures)} attempts ({'; '.join(dict.fromkeys(failures))}); "
            "is it running, and is it the right address?"
        )

    async def _post(self, url: str, body: bytes) -> bytes:
        session, free = self._connections()
        async with free, asyncio.timeout(self.timeout):
            headers = {"Content-Type": "application/json"} | authorization()
            async with session.post(url, data=body, headers=headers) as response:
                content = await response.read()
        if response.status == 200:
            return content
        said = content[:200].decode("utf-8", "replace")
        if 400 <= response.status < 500 and response.status not in (408, 429):
            raise _Rejected(f"status {response.status}: {said}")
        if response.status == 503 and (detail := loading_detail(content)) is not None:
            raise _Loading(detail)
        raise _Nonsense(f"status {response.status}: {said}")

    def _connections(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._session is None or self._free is None or self._loop is not loop:
            if self._session is not None and self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("a RetrieverClient serves one event loop at a time; make one per loop")
            self._loop, self._free = loop, asyncio.Semaphore(self.max_connections)
            # aiohttp's own limit and deadline are off: its deadline would count the wait for a free connection
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session, self._free

    async def close(self) -> None:
        """Close the connections; a later search opens new ones."""
        self._tried = False
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = self._loop = self._free = None


def current_url(address: str) -> str:
    """The URL behind an address, which is one or names a file that holds one. Raises OSError without such a file."""
    if not address.startswith(FILE_PREFIX):
        return address
    return Path(address.removeprefix(FILE_PREFIX)).read_text().strip()


def loading_detail(content: bytes) -> str | None:
    """The progress that a loading server reports in its answer 503, or None for another answer."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    loading = isinstance(answer, dict) and answer.get("status") == LOADING
    return str(answer.get("detail")) if loading else None


def _endpoint(url: str) -> str:
    return url.rstrip("/").removesuffix("/retrieve") + "/retrieve"


class _Nonsense(Exception):
    """An answer that is not one."""


class _Loading(Exception):
    """The server will answer when it has loaded; its text says how far it is."""


class _Rejected(Exception):
    """The server says that the request is wrong."""


def _id(value: Any) -> Any:
    """Other servers send ids as numbers, or null."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class _Document(BaseModel):
    model_config = ConfigDict(strict=True)

    id: Annotated[str, BeforeValidator(_id)] = ""  # Search-R1's BM25 server sends none
    contents: str


class _Hit(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    document: _Document
    score: float


class _Answer(BaseModel):
    result: list[list[_Hit]]


def parse_answer(content: bytes, queries: int, k: int) -> list[list[Document]]:
    """Documents of a ``/retrieve`` answer with scores; _Nonsense unless it has the agreed shape."""
    try:
        # Not orjson or pydantic: both refuse half of a surrogate pair, which servers in Python send as "\\ud83d".
        result = _Answer.model_validate(whole(json.loads(content.decode("utf-8", "replace")))).result
    except (ValueError, RecursionError) as error:
        raise _Nonsense(f"expected documents with contents and scores, found {content[:80]!r}") from error
    lengths = [len(hits) for hits in result]
    if len(lengths) != queries or max(lengths, default=0) > k:
        raise _Nonsense(f"expected {queries} lists of at most {k} documents, found lists of {lengths[:20]}")
    return [[_document(hit) for hit in hits] for hits in result]


def _document(hit: _Hit) -> Document:
    contents = hit.document.contents
    return Document(hit.document.id, *split_contents(contents), hit.score, heading=contents.partition("\n")[0])
