"""Dense retrieval: unit vectors in a Faiss index, exact (flat) or approximate (HNSW); the score is their cosine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import cast

import faiss
import numpy as np

from retrieval.corpus import PassageStore
from retrieval.encoder import TextEncoder
from retrieval.index import EncoderConfig, HNSWConfig
from retrieval.ranges import PositiveInt
from retrieval.types import Hit, IndexFolderError

_ENCODE_AT_ONCE = 4096  # passages; bounds the memory for texts while encoding a large corpus
# faiss-cpu ships 128000, which keeps batches of queries away from BLAS: four times slower at 64 queries
_BLAS_THRESHOLD = 20


def build_faiss_index(
    store: PassageStore,
    output: Path,
    encoder: EncoderConfig,
    *,
    hnsw: HNSWConfig | None = None,
    vectors: str | None = None,
    threads: int = 1,
    device: str = "auto",
) -> None:
    """Encode every passage and write a Faiss index whose row i is passage i.

    With ``vectors`` (a Faiss index of the same passages in the same order) nothing is encoded; the file is taken
    over, by hard link where the disk allows it.  Raises IndexFolderError when it does not fit corpus and encoder.
    """
    faiss.omp_set_num_threads(threads)
    encode = TextEncoder(encoder, threads=threads, device=device)
    if vectors is not None:
        _adopt(Path(vectors), output, passages=len(store), dimension=encode.dimension)
        return
    index = _empty_index(encode.dimension, hnsw)
    for start in range(0, len(store), _ENCODE_AT_ONCE):
        rows = range(start, min(start + _ENCODE_AT_ONCE, len(store)))
        index.add(encode.encode_passages([store[row].contents for row in rows]))
    try:
        faiss.write_index(index, str(output))
    except RuntimeError as error:  # Faiss' own; it names the file and the system's reason
        raise IndexFolderError(f"the vectors could not be written ({error}); is the disk full?") from error


def _empty_index(dimension: int, hnsw: HNSWConfig | None) -> faiss.Index:
    if hnsw is None:
        return faiss.IndexFlatIP(dimension)
    index = faiss.IndexHNSWFlat(dimension, hnsw.m, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = hnsw.ef_construction
    return index


def _adopt(vectors: Path, output: Path, *, passages: int, dimension: int) -> None:
    index = _read(vectors)
    if (index.ntotal, index.d) != (passages, dimension) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexFolderError(
            f"vectors {vectors}: {index.ntotal} vectors of {index.d} numbers; expected {passages} of {dimension}, for "
            "the inner product: give the file made from this corpus with this encoder"
        )
    try:
        os.link(vectors, output)
    except OSError:  # another file system: a link cannot be made, a copy can
        shutil.copyfile(vectors, output)


def _read(path: Path) -> faiss.Index:
    try:
        # mapped, not loaded: exact vectors of wiki-18 are 65 GB, and ranks on one machine share the pages
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise IndexFolderError(f"{path}: Faiss cannot open it ({error}); build the index anew") from error


def require_gpus() -> None:
    """Raises IndexFolderError unless this Faiss can search on GPUs and sees one."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise IndexFolderError(
            f"the vectors should lie on GPUs, but faiss {faiss.__version__} was built without GPU support; install a "
            "build with it (pip uninstall faiss-cpu; pip install faiss-gpu-cu12), or leave gpu out to search on the CPU"
        )
    if faiss.get_num_gpus() == 0:
        raise IndexFolderError("the vectors should lie on GPUs, but Faiss sees none; leave gpu out for the CPU")


def _to_gpus(index: faiss.Index) -> faiss.Index:
    """Shared out over all GPUs as 16-bit floats (Search-R1's retrieval_server.py): half the bytes, exact search."""
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        needed = index.ntotal * index.d * 2 / 1e9
        raise IndexFolderError(
            f"the vectors could not be moved to {faiss.get_num_gpus()} GPUs ({error}); they need {needed:.1f} GB there "
            "in all: take more GPUs, or leave gpu out to search on the CPU"
        ) from error


class DenseSearcher:
    """Encodes the queries of a batch together and searches a Faiss index. One thread only."""

    def __init__(
        self,
        path: Path,
        encoder: EncoderConfig,
        *,
        ef_search: PositiveInt | None = None,
        threads: PositiveInt = 1,
        device: str = "auto",
        gpu: bool = False,
    ) -> None:
        """Raises IndexFolderError when index or encoder cannot be opened, or do not fit each other, or, with ``gpu``,
        when the vectors cannot be moved to the GPUs."""
        if gpu:
            require_gpus()
        faiss.omp_set_num_threads(threads)
        faiss.cvar.distance_compute_blas_threshold = _BLAS_THRESHOLD
        self._index = _read(path)
        self._encoder = TextEncoder(encoder, threads=threads, device=device)
        if self._encoder.dimension != self._index.d:
            raise IndexFolderError(
                f"encoder {encoder.model} gives vectors of {self._encoder.dimension} numbers, {path} holds vectors of "
                f"{self._index.d}; give the encoder that the index was built with"
            )
        if gpu:
            self._index = _to_gpus(self._index)
        self._ef_search = ef_search

    def __len__(self) -> int:
        return self._index.ntotal

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See ``Searcher``. Every query has hits, however remote."""
        return self.search_vectors(self._encoder.encode_queries(queries), k)

    def search_vectors(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """The same for unit vectors [Q, dimension]."""
        if self._ef_search is not None:  # a search narrower than k would return fewer, worse hits
            cast(faiss.IndexHNSWFlat, self._index).hnsw.efSearch = max(self._ef_search, k)
        scores, rows = self._index.search(vectors, k)
        # Faiss fills up with row -1 what it did not find
        return [
            [Hit(int(row), float(score)) for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows, scores, strict=True)
        ]

    def close(self) -> None:
        del self._index, self._encoder
