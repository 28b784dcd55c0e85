"""Search tool over any retriever. Passages look as in Search-R1."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from common.ranges import PositiveInt
from retrieval.types import RetrievalError
from rollout.trajectory import CallOutcome, Document, InfrastructureError, ToolResult

NOTHING_FOUND = "No matching document was found."
EMPTY_QUERY = "The query was empty, so nothing was searched."


class Retriever(Protocol):
    """Interface of a search service: ``retrieval.client.RetrieverClient`` and ``retrieval.process.RetrieverProcess``
    have it. If there is a ``start`` (awaitable, or a function for a thread), it runs with the tool's start; a second
    ``start`` must do nothing."""

    def search(self, queries: list[str], k: Any) -> Any:
        """Return an awaitable of at most ``k`` documents (id, title, text, score) for each query, best first. Raises
        retrieval.types.RetrievalError when the service fails."""
        ...

    def close(self) -> Any:
        """Close the retriever. Returns an awaitable."""
        ...


def format_passages(passages: Iterable[tuple[str, str]]) -> str:
    """Return ``(title, text)`` pairs as one text, as Search-R1 shows hits, with the title in the quotes of the corpus
    files.

    >>> format_passages([("Mira Voss", "A potter of Grey Harbor.")])
    'Doc 1(Title: "Mira Voss") A potter of Grey Harbor.\\n'
    """
    return _numbered((f'"{title}"', text) for title, text in passages)


def _numbered(passages: Iterable[tuple[str, str]]) -> str:
    """Return (heading, text) pairs as one text, as Search-R1's ``_passages2string`` does
    (search_r1/llm_agent/generation.py)."""
    return "".join(f"Doc {i}(Title: {heading}) {text}\n" for i, (heading, text) in enumerate(passages, start=1))


def query_of(arguments: dict[str, Any], clean: Callable[[str], str] = str) -> str | ToolResult:
    """Return the cleaned query of a search call, an ERROR result if it is missing or not a text, or a REFUSED one if it
    is empty."""
    query = arguments.get("query")
    if not isinstance(query, str):
        message = f"search expects a text as its query; found {type(query).__name__}"
        return ToolResult(message, CallOutcome.ERROR, detail=message)
    query = clean(query)
    return query if query.strip() else ToolResult(EMPTY_QUERY, CallOutcome.REFUSED, detail="empty query")


class SearchTool:
    """Searches a text collection. Takes ``{"query": str}`` and returns the ``topk`` best passages.

    Outcomes: OK; EMPTY without a match; REFUSED for an empty query, which is not sent and does not count as a search;
    ERROR when ``query`` is missing or not a string. A failing retriever raises InfrastructureError.
    """

    name = "search"

    def __init__(self, retriever: Retriever, topk: PositiveInt = 3) -> None:
        self.retriever, self.topk = retriever, topk

    async def start(self) -> None:
        """Start the retriever, or check that its servers answer. Raises InfrastructureError if one does not."""
        start = getattr(self.retriever, "start", None)
        try:
            if inspect.iscoroutinefunction(start):
                await start()
            elif start is not None:
                await asyncio.to_thread(start)
        except RetrievalError as error:
            raise InfrastructureError(f"search cannot start: {error}") from error

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        query = query_of(arguments)
        if isinstance(query, ToolResult):
            return query
        try:
            [hits] = await self.retriever.search([query.strip()], self.topk)
        except RetrievalError as error:
            raise InfrastructureError(f"search failed: {error}") from error
        documents = tuple(Document(hit.id, hit.title, hit.text, hit.score) for hit in hits)
        if not documents:
            return ToolResult(NOTHING_FOUND, CallOutcome.EMPTY)
        # The first line of the corpus entry, as released: ``title`` has lost a quotation mark at its beginning or end.
        shown = _numbered((getattr(hit, "heading", "") or f'"{hit.title}"', hit.text) for hit in hits)
        return ToolResult(shown, CallOutcome.OK, documents)

    async def close(self) -> None:
        await self.retriever.close()
