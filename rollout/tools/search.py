"""Search tool over any retriever; passages are shown as in Search-R1."""

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
    """``retrieval.client.RetrieverClient``, ``retrieval.process.RetrieverProcess``, or anything like them. One that has
    a ``start`` (awaitable, or made for a thread) is started with the tool; a second ``start`` must do nothing."""

    def search(self, queries: list[str], k: Any) -> Any:
        """Awaitable of, for each query, at most ``k`` documents (id, title, text, score), best first. Raises
        retrieval.types.RetrievalError when the service fails."""
        ...

    def close(self) -> Any:
        """Awaitable."""
        ...


def format_passages(passages: Iterable[tuple[str, str]]) -> str:
    """``(title, text)`` pairs as Search-R1 shows hits, the title in the quotes that the corpus files carry.

    >>> format_passages([("Mira Voss", "A potter of Grey Harbor.")])
    'Doc 1(Title: "Mira Voss") A potter of Grey Harbor.\\n'
    """
    return _numbered((f'"{title}"', text) for title, text in passages)


def _numbered(passages: Iterable[tuple[str, str]]) -> str:
    """Search-R1's ``_passages2string`` (search_r1/llm_agent/generation.py): one line each, numbered from 1."""
    return "".join(f"Doc {i}(Title: {heading}) {text}\n" for i, (heading, text) in enumerate(passages, start=1))


def query_of(arguments: dict[str, Any], clean: Callable[[str], str] = str) -> str | ToolResult:
    """Return the cleaned query of a call, an ERROR if it is missing or not a text, or REFUSED if it is empty."""
    query = arguments.get("query")
    if not isinstance(query, str):
        message = f"search expects a text as its query; found {type(query).__name__}"
        return ToolResult(message, CallOutcome.ERROR, detail=message)
    query = clean(query)
    return query if query.strip() else ToolResult(EMPTY_QUERY, CallOutcome.REFUSED, detail="empty query")


class SearchTool:
    """``{"query": str}`` to the ``topk`` best passages.

    Outcomes: OK; EMPTY when nothing matches; REFUSED for an empty query, which is not sent to the retriever and does
    not count as a search; ERROR when ``query`` is missing or no string. A failing retriever raises InfrastructureError.
    """

    name = "search"

    def __init__(self, retriever: Retriever, topk: PositiveInt = 3) -> None:
        self.retriever, self.topk = retriever, topk

    async def start(self) -> None:
        """Start the retriever, or see that its servers answer. Raises InfrastructureError when one does not, and what
        the retriever raises for a wrong index."""
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
        # The corpus' own first line, as released: titles that begin or end with a quotation mark lose it in ``title``.
        shown = _numbered((getattr(hit, "heading", "") or f'"{hit.title}"', hit.text) for hit in hits)
        return ToolResult(shown, CallOutcome.OK, documents)

    async def close(self) -> None:
        await self.retriever.close()
