"""Dense retrieval over a Faiss index of unit vectors, and its recall. The score is the cosine."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np

from common.ranges import PositiveInt
from retrieval.corpus import PassageStore
from retrieval.dense.encoder import TextEncoder
from retrieval.dense.faiss_index import kind_of, read_index
from retrieval.dense.sizes import require_memory
from retrieval.dense.vectors import VectorShards
from retrieval.index_config import EncoderConfig, IndexKind
from retrieval.types import Hit, IndexFolderError, Progress

_LISTS_WIDTH = 512
_READ_AT_ONCE = 1 << 26  # bytes, whole pages
_POPULATE_READ = 22  # MADV_POPULATE_READ: into memory and into the page tables
_SAID_EVERY_S = 5.0
# With faiss-cpu's 128000 batches of queries do not use BLAS: four times slower at 64 queries.
_BLAS_THRESHOLD = 20


def require_gpus() -> None:
    """Check that Faiss can search on GPUs and sees one. Raises IndexFolderError."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise IndexFolderError(
            f"gpu is true, but faiss {faiss.__version__} was built without GPU support; install a "
            "build with it (pip uninstall faiss-cpu; pip install faiss-gpu-cu12), or leave gpu out to search on the CPU"
        )
    if faiss.get_num_gpus() == 0:
        raise IndexFolderError("gpu is true, but Faiss sees no GPU; leave gpu out to search on the CPU")


def _to_gpus(index: faiss.Index) -> faiss.Index:
    """Copy an exact Faiss index to the GPUs, divided among all of them, as 16-bit floats. Search-R1's
    retrieval_server.py does the same.
    """
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        needed = index.ntotal * index.d * 2 / 1e9
        raise IndexFolderError(
            f"the vectors could not be moved to {faiss.get_num_gpus()} GPUs ({error}); they need {needed:.1f} GB in "
            "all: take more GPUs, or leave gpu out to search on the CPU"
        ) from error


class DenseSearcher:
    """Encodes queries and searches a Faiss index for the nearest passages. Use it from one thread."""

    def __init__(
        self,
        path: Path,
        encoder: EncoderConfig,
        *,
        ef_search: PositiveInt | None = None,
        probes: PositiveInt | None = None,
        exact: VectorShards | None = None,
        candidates: PositiveInt = 200,
        threads: PositiveInt = 1,
        device: str = "auto",
        gpu: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Open the Faiss index and load the query encoder.

        Args:
            ef_search: width of an HNSW search.
            probes: lists per IVF search.
            progress: receives reports while the file is read.
            exact: vectors that rerank the ``candidates`` of a query.

        Raises IndexFolderError if index or encoder cannot be opened or do not fit each other, if the machine has too
        little memory for the vectors, or, with ``gpu``, if they cannot be moved to the GPUs.
        """
        if gpu:
            require_gpus()
        faiss.omp_set_num_threads(threads)
        faiss.cvar.distance_compute_blas_threshold = _BLAS_THRESHOLD
        self._index = read_index(path)
        if not gpu:
            kind = kind_of(self._index)
            if kind is None:
                raise IndexFolderError(
                    f"{path}: {type(faiss.downcast_index(self._index)).__name__} is an unknown kind of index"
                )
            require_memory(kind, path.stat().st_size, self._index.ntotal, self._index.d)
        self._encoder = TextEncoder(encoder, threads=threads, device=device)
        if self._encoder.dimension != self._index.d:
            raise IndexFolderError(
                f"encoder {encoder.model} has dimension {self._encoder.dimension}, {path} has "
                f"{self._index.d}; give the encoder that the index was built with"
            )
        if gpu:
            self._index = _to_gpus(self._index)
        else:
            read_ahead(path, progress or (lambda text: None))
        self._ef_search, self._exact, self._candidates = ef_search, exact, candidates
        if probes is not None:
            lists: Any = faiss.extract_index_ivf(self._index)
            lists.nprobe = probes
            nearest = faiss.downcast_index(lists.quantizer)
            if isinstance(nearest, faiss.IndexHNSW):  # Faiss's width of 16 misses some of the nearest lists
                cast(faiss.IndexHNSWFlat, nearest).hnsw.efSearch = max(_LISTS_WIDTH, 2 * probes)

    def __len__(self) -> int:
        return self._index.ntotal

    def encode(self, queries: list[str]) -> np.ndarray:
        """Return the unit vectors of search queries, [Q, dimension]."""
        return self._encoder.encode_queries(queries)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return at most ``k`` hits per query, best first. Every query has hits, however distant."""
        return self.search_vectors(self.encode(queries), k)

    def search_vectors(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """Return at most ``k`` hits for each unit vector [Q, dimension], best first."""
        scores, rows = self.nearest(vectors, k)
        # Faiss fills missing hits with row -1
        return [
            [Hit(int(row), float(score)) for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows, scores, strict=True)
        ]

    def nearest(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and row numbers of the nearest vectors, each [Q, k], best first. Row -1 is a missing
        hit."""
        if self._ef_search is not None:  # a width below k would return fewer and worse hits
            cast(faiss.IndexHNSWFlat, self._index).hnsw.efSearch = max(self._ef_search, k)
        if self._exact is None:
            return self._index.search(vectors, k)
        _, rows = self._index.search(vectors, max(k, self._candidates))
        found = self._exact.rows(np.maximum(rows, 0).ravel()).reshape(*rows.shape, -1)
        scores = np.where(rows >= 0, np.einsum("qcd,qd->qc", found, vectors), -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def close(self) -> None:
        del self._index, self._encoder


def read_ahead(path: Path, progress: Progress) -> None:
    """Read the memory-mapped parts of a file from start to end, so that the first searches find them in memory.

    Page faults would read them in random order, at a tenth of the speed.
    """
    libc, size, said = ctypes.CDLL(None), path.stat().st_size, time.monotonic()
    with path.open("rb", buffering=0) as file:
        for start, end, offset in _mappings(path):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_NORMAL)  # Faiss sets random
            for at in range(start, end, _READ_AT_ONCE):
                part = min(_READ_AT_ONCE, end - at)
                if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(part), _POPULATE_READ):  # Linux before 5.14
                    file.seek(at - start + offset)
                    file.read(part)
                if time.monotonic() - said > _SAID_EVERY_S:
                    said, done = time.monotonic(), min(at - start + offset + part, size)
                    progress(f"reading {path}: {done / 1e9:.1f} of {size / 1e9:.1f} GB")


def _mappings(path: Path) -> list[tuple[int, int, int]]:
    """Return the memory mappings of a file in this process, each as (start, end, offset in the file)."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    own = [line for line in lines if len(line) == 6 and line[5] == str(path.resolve())]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in own]
    return [(start, end, int(line[2], 16)) for (start, end), line in zip(ends, own, strict=True)]


def open_dense(
    folder: Path,
    kind: IndexKind,
    settings: Mapping[str, Any],
    *,
    encoder: str | None = None,
    ef_search: int | None = None,
    probes: int | None = None,
    threads: int = 1,
    device: str = "auto",
    gpu: bool = False,
    progress: Progress | None = None,
) -> DenseSearcher:
    """Open the Faiss index of an index folder for search.

    Args:
        settings: from the index's metadata.
        encoder: folder of the encoder; by default the folder at build time.
        ef_search, probes: by default the index's own.

    Raises IndexFolderError, see ``DenseSearcher``.
    """
    values = dict(settings["encoder"])
    values["model"] = encoder or values["model"]
    options: dict[str, Any] = {}
    if kind == "dense_hnsw":
        options["ef_search"] = ef_search or settings.get("hnsw", {}).get("ef_search")
    if kind == "dense_ivfpq":
        own = settings["ivfpq"]
        exact = folder / "vectors"  # missing for an existing Faiss file
        options |= {"probes": probes or own["probes"], "candidates": own["candidates"]}
        options["exact"] = VectorShards(exact) if exact.is_dir() else None
    return DenseSearcher(
        folder / "faiss.index", EncoderConfig(**values),
        threads=threads, device=device, gpu=gpu, progress=progress, **options,
    )  # fmt: skip


QUERIES, WORDS, BEST = 200, 12, 3


def sampled_recall(
    folder: Path, vectors: Path, kind: IndexKind, settings: dict[str, Any], threads: int, device: str
) -> float:
    """Return recall@3 of a Faiss index against exact search: the share of the three nearest vectors that it finds.
    ``folder`` has the index, ``vectors`` the exact vectors.

    The queries are the first words of passages.
    """
    store, shards = PassageStore(folder), VectorShards(vectors)
    rows = np.unique(np.linspace(0, len(store) - 1, min(QUERIES, len(store))).astype(int))
    texts = [" ".join(store[int(row)].contents.partition("\n")[2].split()[:WORDS]) for row in rows]
    searcher = open_dense(folder, kind, settings, threads=threads, device=device)
    queries = searcher.encode(texts)
    _, found = searcher.nearest(queries, min(BEST, len(store)))
    searcher.close()
    share = round(recall(found, queries, shards), 4)
    print(f"recall@{BEST} of {kind} against exact search, {len(texts)} queries: {share}", file=sys.stderr, flush=True)
    return share


def recall(found: np.ndarray, queries: np.ndarray, shards: VectorShards) -> float:
    """Return the mean recall@k: the share of the exact k nearest vectors that ``found`` (row numbers, [Q, k]) contains.
    ``queries``: [Q, dimension].
    """
    k = found.shape[1]
    scores, rows, start = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64), 0
    for vectors in shards:
        best, at = faiss.knn(queries, vectors, min(k, len(vectors)), metric=faiss.METRIC_INNER_PRODUCT)
        scores, rows = np.concatenate([scores, best], axis=1), np.concatenate([rows, at + start], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
        start += len(vectors)
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), rows.tolist(), strict=True)]
    return sum(hits) / rows.size
