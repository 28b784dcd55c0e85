"""Documents, hits, what a search server answers from, and the errors of retrieval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.errors import FileError

Progress = Callable[[str], None]  # says how far a load is, see ``retrieval.batching.OwnerThread``
LOADING = "loading"  # status of a server, in the JSON of its answer 503, until it can search


class RetrievalFailure(Exception):
    """Root of everything this package raises on purpose."""


class RetrievalError(RetrievalFailure, RuntimeError):
    """A search could not be answered: server down, slow, or answering nonsense. Never the query's fault."""


class RetrieverStartError(RetrievalFailure, RuntimeError):
    """A retriever process did not come up. The message holds the end of its log."""


class CorpusError(RetrievalFailure, FileError):
    """A corpus file cannot be used as it is. The message names the file and the line."""


class IndexFolderError(RetrievalFailure, ValueError):
    """An index folder is missing, incomplete, or was built from another corpus."""


@dataclass(frozen=True, slots=True)
class Document:
    """One retrieved passage.

    ``score`` is comparable only within one answer of one index: BM25 weight, inner product, or fused rank weight.
    """

    id: str  # the corpus' own id
    title: str  # without the quotes of the corpus file
    text: str
    score: float
    heading: str = field(default="", compare=False)  # the title as the corpus file has it; "": not known

    @property
    def contents(self) -> str:
        """The passage as in a Search-R1 corpus: ``"Title"``, a line break, the text."""
        heading = self.heading or f'"{self.title}"'
        return f"{heading}\n{self.text}"


class Hit(NamedTuple):
    """A searcher's answer before the passage is looked up."""

    row: int  # position of the passage in the corpus, from 0
    score: float


class SearchBackend(Protocol):
    """What a search server answers from: index folders (``retrieval.retriever.Retriever``), another engine, several
    fused (``retrieval.hybrid.Hybrid``), one ranked again (``retrieval.rerank.Reranked``).

    Every method, the constructor too, is called from one and the same thread. ``metadata``, if there is one, is shown
    by ``GET /health``.
    """

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """For each query at most ``k`` documents, best first; none when nothing matches. A document has the same
        ``id`` in every answer."""
        ...

    def close(self) -> None: ...


class Searcher(Protocol):
    """An opened index. Every method is called from one and the same thread."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """For each query at most ``k`` hits, best first; none when nothing matches."""
        ...

    def close(self) -> None: ...


def split_contents(contents: str) -> tuple[str, str]:
    """``'"Title"\\ntext'`` -> ``('Title', 'text')``, as Search-R1's retrieval_server.py does it.

    Everything after the first line break belongs to the text, further line breaks included.
    """
    title, _, text = contents.partition("\n")
    return title.strip('"'), text
