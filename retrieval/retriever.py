"""Retriever: opens index folders and answers queries with passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval.corpus import PassageStore
from retrieval.index import IndexMetadata, check_index
from retrieval.ranges import NonNegativeFloat, PositiveInt, UnitInterval
from retrieval.types import Hit, IndexFolderError, Searcher


@dataclass(frozen=True)
class SearchSettings:
    """What may differ between two servers over the same index. None means the default in brackets."""

    threads: PositiveInt = 1  # for Lucene, torch and Faiss
    k1: NonNegativeFloat | None = None  # BM25 (0.9)
    b: UnitInterval | None = None  # BM25 (0.4)
    java_heap: str | None = None  # BM25: memory of the JVM (1g)
    encoder: str | None = None  # dense: where the encoder lies now (where it lay when the index was built)
    device: str | None = None  # dense: where the encoder runs (auto: a GPU if there is one)
    gpu: bool | None = None  # dense_flat: vectors and encoder on the GPUs (the vectors in memory, on the CPU)
    ef_search: PositiveInt | None = None  # dense_hnsw: width of the search (the index's own)
    probes: PositiveInt | None = None  # dense_ivfpq: lists that a search looks into (the index's own)

    def check(self, indexes: list[IndexMetadata]) -> None:
        """ValueError when a setting would have no effect on these indexes."""
        kinds = {metadata.kind for metadata in indexes}
        kinds |= {"dense"} if kinds - {"bm25"} else set()
        names_of = {
            "bm25": ("k1", "b", "java_heap"), "dense": ("encoder", "device"), "dense_flat": ("gpu",),
            "dense_hnsw": ("ef_search",), "dense_ivfpq": ("probes",),
        }  # fmt: skip
        for kind, names in names_of.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and kind not in kinds:
                raise ValueError(f"{', '.join(given)}: for {kind} indexes only, and there is none; leave it out")
        if self.gpu and not (self.device or "cuda").startswith("cuda"):
            raise ValueError(f"gpu puts the encoder on a GPU too; found device {self.device!r}: leave one of them out")

    def for_bm25(self) -> dict[str, Any]:
        """Arguments of ``BM25Searcher`` that are not left to their defaults."""
        values = {"k1": self.k1, "b": self.b, "heap": self.java_heap}
        return {name: value for name, value in values.items() if value is not None}


def check_indexes(indexes: list[str], corpus: str | None = None) -> list[IndexMetadata]:
    """Describe the folders; IndexFolderError unless all are whole and of one corpus (the given one, if any)."""
    described = [check_index(folder, corpus) for folder in indexes]
    for folder, metadata in zip(indexes, described, strict=True):
        if metadata.corpus_sha256 != described[0].corpus_sha256:
            raise IndexFolderError(
                f"index {folder} was built from another corpus ({metadata.corpus}) than index {indexes[0]} "
                f"({described[0].corpus}); hybrid retrieval needs indexes of one corpus"
            )
    return described


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], k: int, constant: int = 60) -> list[Hit]:
    """The best ``k`` of several rankings by ``sum of 1 / (constant + rank)``, ranks from 1.

    Scores of the rankings play no part, so that BM25 weights and cosines need no common scale; equal sums come in
    corpus order.  Source: Cormack, Clarke, Buettcher (SIGIR 2009), whose constant is 60.
    """
    weights: dict[int, float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            weights[hit.row] = weights.get(hit.row, 0.0) + 1.0 / (constant + rank)
    best = sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:k]
    return [Hit(row, weight) for row, weight in best]


class HybridSearcher:
    """Asks every searcher for ``depth`` hits and fuses them."""

    def __init__(self, searchers: list[Searcher], depth: PositiveInt = 100) -> None:
        self.searchers, self.depth = searchers, depth

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        rankings = [searcher.search(queries, max(k, self.depth)) for searcher in self.searchers]
        return [reciprocal_rank_fusion(of_query, k) for of_query in zip(*rankings, strict=True)]

    def close(self) -> None:
        for searcher in self.searchers:
            searcher.close()


class Retriever:
    """Texts in, ranked passages out. Create it and use it in one thread (see ``bm25``)."""

    def __init__(self, indexes: list[str], settings: SearchSettings, corpus: str | None = None) -> None:
        """Raises IndexFolderError when a folder is missing, broken or of another corpus."""
        self.metadata = check_indexes(indexes, corpus)
        self.store = PassageStore(Path(indexes[0]))
        pairs = zip(indexes, self.metadata, strict=True)
        searchers = [_open(Path(folder), metadata, settings) for folder, metadata in pairs]
        self._searcher = searchers[0] if len(searchers) == 1 else HybridSearcher(searchers)

    def search(self, queries: list[str], k: int) -> list[list[tuple[dict[str, str], float]]]:
        """For each query at most ``k`` pairs (document as in ``PassageStore.document``, score), best first."""
        if not queries:
            return []
        return [[self._resolve(hit) for hit in hits] for hits in self._searcher.search(queries, k)]

    def __len__(self) -> int:
        """Passages."""
        return len(self.store)

    def _resolve(self, hit: Hit) -> tuple[dict[str, str], float]:
        return self.store.document(hit.row), hit.score

    def close(self) -> None:
        self._searcher.close()


def _open(folder: Path, metadata: IndexMetadata, settings: SearchSettings) -> Searcher:
    if metadata.kind == "bm25":
        from retrieval.bm25 import BM25Searcher

        searcher = BM25Searcher(folder / "lucene", threads=settings.threads, **settings.for_bm25())
    else:
        from retrieval.dense.opened import open_dense

        gpu = bool(settings.gpu) and metadata.kind == "dense_flat"
        searcher = open_dense(
            folder, metadata.kind, metadata.settings, encoder=settings.encoder, ef_search=settings.ef_search,
            probes=settings.probes, threads=settings.threads, device=settings.device or ("cuda" if gpu else "auto"),
            gpu=gpu,
        )  # fmt: skip
    if len(searcher) != metadata.passages:
        raise IndexFolderError(
            f"index {folder} holds {len(searcher)} of the {metadata.passages} passages that its metadata names; "
            "build it anew"
        )
    return searcher
