"""Types of retrieval: documents, hits, search backends and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.errors import FileError

Progress = Callable[[str], None]  # reports how far a load is, see ``retrieval.batching.OwnerThread``
LOADING = "loading"  # status of a server, in the JSON of its answer 503, until it can search


class RetrievalFailure(Exception):
    """Base class of the errors of the retrieval package."""


class RetrievalError(RetrievalFailure, RuntimeError):
    """A search failed: the search server is down, slow, or sends invalid answers. Never the query's fault."""


class RetrieverStartError(RetrievalFailure, RuntimeError):
    """A retriever process failed to start. The message has the end of its log."""


class CorpusError(RetrievalFailure, FileError):
    """A corpus file cannot be used. The message names the file and the line."""


class IndexFolderError(RetrievalFailure, ValueError):
    """An index folder is missing, incomplete, or was built from another corpus."""


@dataclass(frozen=True, slots=True)
class Document:
    """One retrieved passage.

    ``score`` is a BM25 weight, an inner product or a fused rank weight. Compare it only within one answer of one index.
    """

    id: str  # id in the corpus
    title: str  # without the quotes of the corpus file
    text: str
    score: float
    heading: str = field(default="", compare=False)  # the title line of the corpus file; "": unknown

    @property
    def contents(self) -> str:
        """The passage as in a Search-R1 corpus: ``"Title"``, a line break, the text."""
        heading = self.heading or f'"{self.title}"'
        return f"{heading}\n{self.text}"


class Hit(NamedTuple):
    """A found passage as its row number in the corpus and its score, before the passage is read."""

    row: int  # position of the passage in the corpus, from 0
    score: float


class SearchBackend(Protocol):
    """Backend of a search server: returns documents for queries.

    Examples: index folders (``retrieval.retriever.Retriever``), another search engine, a reranker around a backend. One
    thread calls the constructor and every method. ``GET /health`` shows the attribute ``metadata``, if it exists.
    """

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """Return at most ``k`` documents per query, best first. A document has the same ``id`` in every answer."""
        ...

    def close(self) -> None: ...


class Searcher(Protocol):
    """An opened search index that returns row numbers and scores. One thread calls every method."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return at most ``k`` hits per query, best first."""
        ...

    def close(self) -> None: ...


def split_contents(contents: str) -> tuple[str, str]:
    """Split ``'"Title"\\ntext'`` into ``('Title', 'text')``, as Search-R1's retrieval_server.py does.

    The text is everything after the first line break.
    """
    title, _, text = contents.partition("\n")
    return title.strip('"'), text
