"""Client of retrieval servers, with pooled connections, deadlines and retries."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict

from common.async_calls import pause_before_retry
from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.secret import authorization
from common.sessions import LoopSession
from common.text import whole
from retrieval.types import LOADING, Document, RetrievalError, split_contents

LOADING_TIMEOUT_S = 1800.0  # seconds for a server to load
LOADING_PAUSE_S = 2.0  # seconds until a loading server is asked again
FILE_PREFIX = "file:"
logger = logging.getLogger(__name__)


class RetrieverClient:
    """HTTP client that searches with one of several equal servers (Search-R1's API, see ``retrieval.server``), in round
    robin.

    If a server is down, slow, or sends an invalid answer, the client tries the next URL after a pause of
    ``backoff * 2**attempt`` seconds, times a random factor between 0.5 and 1.5 so that many clients do not return at
    once.  A request that the server rejects (status 4xx except 408 and 429) is not repeated.  The client waits for a
    server that is loading; this wait is not an attempt, and not part of ``timeout``. The client sends the environment's
    secret (``common.secret``).

    Use it from one event loop at a time; a new loop gets new connections.

    An address may also be ``file:PATH``, a file with the URL, which the server writes when it listens (``--announce``).
    The client reads it again after a failed attempt, so that running and resumed runs find a server that has moved.

    Args:
        urls: such as ``["http://127.0.0.1:8000"]``, with or without ``/retrieve``, or ``["file:outputs/search.url"]``.
        timeout: seconds for one attempt, without the wait for a free connection.
        retries: further attempts after the first.
        backoff: seconds before the first retry.
        max_connections: requests in flight at once.
        loading_timeout: seconds that one search waits for loading servers.
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
        self.urls = [url if url.startswith(FILE_PREFIX) else _endpoint(url) for url in urls]
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.loading_timeout = loading_timeout
        self._told_loading: set[str] = set()
        self._next_url = itertools.cycle(self.urls)
        self._session = LoopSession("a RetrieverClient", max_connections)
        self._tried = False

    async def start(self) -> None:
        """Check the servers: send a test query to each one, at the first call. Raises RetrievalError unless all answer.

        So a wrong address is reported before anything else starts.
        """
        if not self._tried:
            await asyncio.gather(*(self._search(["test"], 1, itertools.repeat(url)) for url in set(self.urls)))
            self._tried = True

    async def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Return at most ``k`` documents per query, best first.

        Raises RetrievalError if no attempt brought a valid answer, ValueError for ``k`` < 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1; found {k}")
        return await self._search(queries, k, self._next_url) if queries else []

    async def _search(self, queries: list[str], k: int, urls: Iterator[str]) -> list[list[Document]]:
        texts = [query.encode("utf-8", "replace").decode("utf-8") for query in queries]
        body = orjson.dumps({"queries": texts, "topk": k, "return_scores": True})
        failures: list[str] = []
        loading, loading_since = 0, 0.0  # number of answers "loading"
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
                        f"{url} is still loading after {self.loading_timeout:g} s ({error}); wait until it "
                        "is ready, or raise loading_timeout"
                    ) from error
                if url not in self._told_loading:
                    self._told_loading.add(url)
                    logger.warning("waiting for the retriever at %s, which is loading: %s", url, error)
                loading += 1
                if loading % len(self.urls) == 0:  # another server may be ready
                    await asyncio.sleep(pause_before_retry(1, LOADING_PAUSE_S))
                continue
            except _Rejected as error:
                raise RetrievalError(f"{url} rejected the request: {error}") from error
            except TimeoutError:
                failures.append(f"{url}: no answer within {self.timeout:g} s")
            except (aiohttp.ClientError, OSError, _Nonsense) as error:
                failures.append(f"{url}: {type(error).__name__.strip('_')}: {error}")
            if len(failures) <= self.retries:
                await asyncio.sleep(pause_before_retry(len(failures), self.backoff))
        raise RetrievalError(
            f"no answer from the retriever after {len(failures)} attempts ({'; '.join(dict.fromkeys(failures))}); "
            "see that it is running, and that the address is right"
        )

    async def _post(self, url: str, body: bytes) -> bytes:
        session, free = self._session.open()
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

    async def close(self) -> None:
        """Close the connections to the servers. A later search opens new ones."""
        self._tried = False
        await self._session.close()


def current_url(address: str) -> str:
    """Return the URL of a server. The address is the URL itself, or ``file:PATH`` of a file with the URL. Raises
    OSError without the file.
    """
    if not address.startswith(FILE_PREFIX):
        return address
    return Path(address.removeprefix(FILE_PREFIX)).read_text().strip()


def loading_detail(content: bytes) -> str | None:
    """Return the progress text in a loading server's answer 503, or None for another answer."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    loading = isinstance(answer, dict) and answer.get("status") == LOADING
    return str(answer.get("detail")) if loading else None


def _endpoint(url: str) -> str:
    return url.rstrip("/").removesuffix("/retrieve") + "/retrieve"


class _Nonsense(Exception):
    """A search server sent an invalid answer."""


class _Loading(Exception):
    """The search server is still loading its index. The message says how far it is."""


class _Rejected(Exception):
    """The search server rejected the request (status 4xx)."""


def _id(value: Any) -> Any:
    """Return a document id as text if a server gave it as a whole number or null (""), and other values unchanged."""
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
    """Return the documents in a server's ``/retrieve`` answer with scores, one list per query. Raises _Nonsense for
    another format.
    """
    try:
        # Not orjson or pydantic: both refuse lone surrogates, which Python servers send as "\\ud83d".
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
