"""Opens index folders and answers queries with passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeFloat, PositiveInt, UnitInterval
from retrieval.corpus import PassageStore
from retrieval.index_config import IndexMetadata, check_index, how_read
from retrieval.types import Document, Hit, IndexFolderError, Progress, Searcher


@dataclass(frozen=True)
class SearchSettings:
    """Options of a search, which may differ between servers of one index. None: the default in brackets."""

    threads: PositiveInt = 1  # for Lucene, torch and Faiss
    k1: NonNegativeFloat | None = None  # BM25 (0.9)
    b: UnitInterval | None = None  # BM25 (0.4)
    java_heap: str | None = None  # BM25: memory of the JVM (1g)
    encoder: str | None = None  # dense: folder of the encoder (the folder at build time)
    device: str | None = None  # dense: device of the encoder (auto: a GPU if available)
    gpu: bool | None = None  # dense_flat: vectors and encoder on the GPUs (vectors in host memory)
    ef_search: PositiveInt | None = None  # dense_hnsw: width of the search (the index's own)
    probes: PositiveInt | None = None  # dense_ivfpq: lists per search (the index's own)

    def check(self, indexes: list[IndexMetadata]) -> None:
        """Raise ValueError for search options that have no effect on these indexes."""
        kinds = {metadata.kind for metadata in indexes}
        kinds |= {"dense"} if kinds - {"bm25"} else set()
        names_of = {
            "bm25": ("k1", "b", "java_heap"), "dense": ("encoder", "device"), "dense_flat": ("gpu",),
            "dense_hnsw": ("ef_search",), "dense_ivfpq": ("probes",),
        }  # fmt: skip
        for kind, names in names_of.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and kind not in kinds:
                raise ValueError(f"{', '.join(given)}: only for {kind} indexes, and none is given; leave it out")
        if self.gpu and not (self.device or "cuda").startswith("cuda"):
            raise ValueError(f"gpu puts the encoder on a GPU too; found device {self.device!r}: leave one of them out")

    def for_bm25(self) -> dict[str, Any]:
        """Return the options for ``BM25Searcher`` that differ from its defaults, by name."""
        values = {"k1": self.k1, "b": self.b, "heap": self.java_heap}
        return {name: value for name, value in values.items() if value is not None}


def check_indexes(indexes: list[str], corpus: str | None = None) -> list[IndexMetadata]:
    """Return the metadata of all index folders. Raises IndexFolderError unless all are complete and built from the same
    corpus (``corpus``, if given).
    """
    described = [check_index(folder, corpus) for folder in indexes]
    for folder, metadata in zip(indexes, described, strict=True):
        if (metadata.corpus_sha256, how_read(metadata)) != (described[0].corpus_sha256, how_read(described[0])):
            raise IndexFolderError(
                f"index {folder} was built from another corpus ({metadata.corpus}), or read it with other columns or "
                f"skip_malformed, than index {indexes[0]} ({described[0].corpus}); a hybrid needs the same passages"
            )
    return described


def reciprocal_rank_fusion(rankings: Sequence[Sequence[int]], k: int, constant: int = 60) -> list[tuple[int, float]]:
    """Fuse several rankings of passages (row numbers) and return the best ``k`` rows with their weights. A row's weight
    is the sum of 1 / (constant + rank), ranks from 1.

    Scores are ignored, so that BM25 weights and cosines need no common scale. Equal sums are ordered by row.
    Source: Cormack, Clarke, Buettcher (SIGIR 2009), whose constant is 60.
    """
    weights: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            weights[row] = weights.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:k]


class _Fused:
    """Searches with several searchers of one corpus, and fuses the ``depth`` best rows of each."""

    def __init__(self, searchers: list[Searcher], depth: int = 100) -> None:
        self.searchers, self.depth = searchers, depth

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        rankings = [searcher.search(queries, max(k, self.depth)) for searcher in self.searchers]
        rows = [[[hit.row for hit in ranking] for ranking in of_query] for of_query in zip(*rankings, strict=True)]
        return [[Hit(*fused) for fused in reciprocal_rank_fusion(of_query, k)] for of_query in rows]

    def close(self) -> None:
        for searcher in self.searchers:
            searcher.close()


class Retriever:
    """Searches one index folder, or several of one corpus whose rankings are fused. A ``SearchBackend``.

    Args:
        index: folder, or folders.
        corpus: the file that they must have been built from, if given.
        progress: receives reports while the index is opened.

    Raises IndexFolderError if a folder is missing, damaged or of another corpus, ValueError for settings without
    effect.
    """

    def __init__(
        self,
        index: str | list[str],
        settings: SearchSettings = SearchSettings(),
        corpus: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        folders = [index] if isinstance(index, str) else index
        self.metadata = check_indexes(folders, corpus)
        settings.check(self.metadata)
        self.store = PassageStore(Path(folders[0]))
        pairs = zip(folders, self.metadata, strict=True)
        searchers = [_open(Path(folder), metadata, settings, progress) for folder, metadata in pairs]
        self._searcher = searchers[0] if len(searchers) == 1 else _Fused(searchers)

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        if not queries:
            return []
        found = self._searcher.search(queries, min(k, len(self.store)))
        return [[self.store.document(hit.row, hit.score) for hit in hits] for hits in found]

    def close(self) -> None:
        self._searcher.close()


def _open(folder: Path, metadata: IndexMetadata, settings: SearchSettings, progress: Progress | None) -> Searcher:
    if metadata.kind == "bm25":
        from retrieval.bm25 import BM25Searcher

        searcher = BM25Searcher(folder / "lucene", threads=settings.threads, **settings.for_bm25())
    else:
        from retrieval.dense.searcher import open_dense

        gpu = bool(settings.gpu) and metadata.kind == "dense_flat"
        searcher = open_dense(
            folder, metadata.kind, metadata.settings, encoder=settings.encoder, ef_search=settings.ef_search,
            probes=settings.probes, threads=settings.threads, device=settings.device or ("cuda" if gpu else "auto"),
            gpu=gpu, progress=progress,
        )  # fmt: skip
    if len(searcher) != metadata.passages:
        raise IndexFolderError(
            f"index {folder} has {len(searcher)} of the {metadata.passages} passages of its metadata; build it again"
        )
    return searcher
