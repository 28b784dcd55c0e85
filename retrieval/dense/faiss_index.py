"""Builds Faiss indexes from vectors on disk, and checks existing Faiss files."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, cast

import faiss
import numpy as np

from retrieval.dense.sizes import (
    GRAPH_FROM,
    GRAPH_LINKS,
    code_bytes_of,
    index_bytes,
    lists_of,
    require_memory,
    training_vectors,
)
from retrieval.dense.vectors import VectorShards
from retrieval.index_config import HNSWConfig, IndexKind, IVFPQConfig
from retrieval.types import IndexFolderError

_KMEANS_ITERATIONS = 10  # for the lists, which take most of the build time
_CODES = 256  # values of a code byte, and least number of vectors to train them
_FLAT_CODE = b"IxFI"  # start of an IndexFlatIP file: code, dimension (int32), vectors (int64), ...


def factory_of(
    kind: IndexKind, passages: int, dimension: int, hnsw: HNSWConfig | None, ivfpq: IVFPQConfig | None
) -> str:
    """Return the description of an index kind for ``faiss.index_factory``, such as "HNSW64,Flat". Raises
    IndexFolderError for options that do not fit.
    """
    if kind == "dense_hnsw":
        return f"HNSW{(hnsw or HNSWConfig()).m},Flat"
    if kind == "dense_ivfpq":
        config = ivfpq or IVFPQConfig()
        code_bytes = code_bytes_of(config, dimension)
        if dimension % code_bytes:
            raise IndexFolderError(
                f"ivfpq.code_bytes is {code_bytes}, which does not divide the dimension {dimension}; "
                f"take one of {', '.join(str(n) for n in range(1, dimension + 1) if not dimension % n)}"
            )
        if passages < _CODES:
            raise IndexFolderError(f"dense_ivfpq needs {_CODES} passages, found {passages}; take dense_flat for so few")
        lists = lists_of(config, passages)
        # rotated first, so that all code bytes carry equal information
        return f"RR{dimension},IVF{lists}{f'_HNSW{GRAPH_LINKS}' if lists >= GRAPH_FROM else ''},PQ{code_bytes}x8"
    return {"dense_flat": "Flat", "dense_fp16": "SQfp16", "dense_sq8": "SQ8"}[kind]


def check_kind(
    kind: IndexKind, passages: int, dimension: int, hnsw: HNSWConfig | None, ivfpq: IVFPQConfig | None
) -> None:
    """Check that an index of this kind can be built, and fits this machine's memory. Raises IndexFolderError."""
    factory_of(kind, passages, dimension, hnsw, ivfpq)
    if kind != "dense_flat":  # written from file to file
        require_memory(kind, index_bytes(kind, passages, dimension, hnsw, ivfpq), passages, dimension)


def build_faiss_index(
    shards: VectorShards,
    output: Path,
    kind: IndexKind,
    *,
    hnsw: HNSWConfig | None = None,
    ivfpq: IVFPQConfig | None = None,
    threads: int = 1,
) -> None:
    """Build a Faiss index from the vectors and write it to ``output``; row i is vector i. Exact vectors go from file to
    file; other kinds are built in memory.
    """
    faiss.omp_set_num_threads(threads)
    if kind == "dense_flat":
        _write_flat(shards, output)
        return
    index = faiss.index_factory(
        shards.dimension, factory_of(kind, len(shards), shards.dimension, hnsw, ivfpq), faiss.METRIC_INNER_PRODUCT
    )
    if kind == "dense_hnsw":
        cast(faiss.IndexHNSWFlat, index).hnsw.efConstruction = (hnsw or HNSWConfig()).ef_construction
    if kind == "dense_ivfpq":  # without the training for Hamming distances, which are not used
        inner: Any = faiss.downcast_index(faiss.extract_index_ivf(index))
        inner.do_polysemous_training = False
        inner.cp.niter = _KMEANS_ITERATIONS
        inner.cp.min_points_per_centroid = inner.pq.cp.min_points_per_centroid = 1  # no warnings for a small corpus
    if not index.is_trained:
        index.train(_sample(shards, ivfpq))
    for vectors in shards:
        index.add(vectors)
    try:
        faiss.write_index(index, str(output))
    except RuntimeError as error:  # the message has the file and the system's reason
        raise IndexFolderError(f"the vectors could not be written ({error}); is the disk full?") from error


def _sample(shards: VectorShards, ivfpq: IVFPQConfig | None) -> np.ndarray:
    """Return evenly spaced vectors of the corpus, to train a Faiss index."""
    count = training_vectors(ivfpq or IVFPQConfig(), len(shards))
    return shards.rows(np.linspace(0, len(shards) - 1, count).astype(np.int64))


def _write_flat(shards: VectorShards, output: Path) -> None:
    """Write vectors to ``output`` as an exact Faiss index (IndexFlatIP) without loading them (65 GB for wiki-18)."""
    one = faiss.IndexFlatIP(shards.dimension)
    one.add(np.zeros((1, shards.dimension), dtype=np.float32))
    written = faiss.serialize_index(one).tobytes()
    header = bytearray(written[: -8 - 4 * shards.dimension])  # followed by the number of floats and the floats
    if header[:4] != _FLAT_CODE or struct.unpack_from("<iq", header, 4) != (shards.dimension, 1):
        raise IndexFolderError(f"faiss {faiss.__version__} writes exact indexes in an unknown format; expected IxFI")
    struct.pack_into("<q", header, 8, len(shards))
    try:
        with output.open("wb") as file:
            _write_parts(file, bytes(header), shards)
    except OSError as error:
        raise IndexFolderError(f"the vectors could not be written ({error}); is the disk full?") from error
    if read_index(output).ntotal != len(shards):
        raise IndexFolderError(f"{output} does not have the vectors that were written; build it again")


def _write_parts(file: BinaryIO, header: bytes, shards: VectorShards) -> None:
    file.write(header)
    file.write(struct.pack("<q", len(shards) * shards.dimension))
    for vectors in shards:
        file.write(np.ascontiguousarray(vectors).data)
    file.flush()
    os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------- files that exist
def check_vectors(path: Path, kind: IndexKind, passages: int, dimension: int) -> tuple[faiss.Index, IndexKind]:
    """Open an existing Faiss file from which an index of ``kind`` can be built. Returns the Faiss index and its own
    kind: the same, or exact. Raises IndexFolderError for other kinds, and if it does not fit corpus and encoder.

    Raises IndexFolderError for other kinds, and if it does not fit corpus and encoder.
    """
    index = read_index(path)
    found = kind_of(index)
    if found is None or found not in (kind, "dense_flat"):
        name = type(faiss.downcast_index(index)).__name__
        advice = f"which is kind {found}: set the kind to it" if found else "which is an unknown kind"
        raise IndexFolderError(f"vectors {path}: {name}, {advice}, or give exact vectors; expected {kind}")
    if (index.ntotal, index.d) != (passages, dimension) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexFolderError(
            f"vectors {path}: {index.ntotal} vectors of dimension {index.d}; expected {passages} of {dimension}, for "
            "the inner product; give the file built from this corpus with this encoder"
        )
    return index, found


def kind_of(index: faiss.Index) -> IndexKind | None:
    """Return the kind of a Faiss index, such as "dense_hnsw", or None if unknown."""
    index = faiss.downcast_index(index)
    turned = isinstance(index, faiss.IndexPreTransform)
    if isinstance(faiss.downcast_index(index.index) if turned else index, faiss.IndexIVFPQ):
        return "dense_ivfpq"
    if isinstance(index, faiss.IndexHNSWFlat):
        return "dense_hnsw"
    if isinstance(index, faiss.IndexScalarQuantizer):
        kinds: dict[int, IndexKind] = {
            faiss.ScalarQuantizer.QT_fp16: "dense_fp16", faiss.ScalarQuantizer.QT_8bit: "dense_sq8",
        }  # fmt: skip
        return kinds.get(index.sq.qtype)
    return "dense_flat" if isinstance(index, faiss.IndexFlat) else None


def read_index(path: Path) -> faiss.Index:
    """Open a Faiss index file through a memory map, so that processes on one machine share its pages. Raises
    IndexFolderError.
    """
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise IndexFolderError(f"{path}: Faiss cannot open it ({error}); build the index again") from error
