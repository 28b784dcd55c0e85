"""Fuses the rankings of several backends by the documents' ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from common.ranges import PositiveInt
from retrieval.types import Document, SearchBackend

Key = TypeVar("Key", bound=Hashable)


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Key]], k: int, constant: int = 60) -> list[tuple[Key, float]]:
    """Return the best ``k`` keys by ``sum of 1 / (constant + rank)``, ranks from 1, with these weights.

    Scores are ignored, so that BM25 weights and cosines need no common scale. Equal sums are ordered by key.
    Source: Cormack, Clarke, Buettcher (SIGIR 2009), whose constant is 60.
    """
    weights: dict[Any, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(ranking, start=1):
            weights[key] = weights.get(key, 0.0) + 1.0 / (constant + rank)
    return sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:k]


class Hybrid:
    """Fuses the ``depth`` best documents of several backends. Equal ids get the text of the first backend.

    For indexes of one corpus ``Retriever`` is faster, because it reads only the ``k`` best passages.
    """

    def __init__(self, backends: list[SearchBackend], depth: PositiveInt = 100) -> None:
        if not backends:
            raise ValueError("backends: expected at least one")
        self.backends, self.depth = backends, depth

    @property
    def metadata(self) -> list[Any]:
        return [part for backend in self.backends for part in describe(backend)]

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        answers = [backend.search(queries, max(k, self.depth)) for backend in self.backends]
        return [_fuse(rankings, k) for rankings in zip(*answers, strict=True)]

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def _fuse(rankings: Sequence[list[Document]], k: int) -> list[Document]:
    documents = {document.id: document for ranking in reversed(rankings) for document in ranking}
    fused = reciprocal_rank_fusion([[document.id for document in ranking] for ranking in rankings], k)
    return [replace(documents[id_], score=weight) for id_, weight in fused]


def describe(backend: SearchBackend) -> list[Any]:
    """Return the metadata of a backend's indexes, or its class, to show and to compare servers."""
    return getattr(backend, "metadata", None) or [{"kind": f"{type(backend).__module__}.{type(backend).__qualname__}"}]
