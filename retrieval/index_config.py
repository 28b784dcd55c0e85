"""Kinds of index, their configurations, and the metadata of index folders (``metadata.json``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from common.ranges import PositiveInt
from retrieval.corpus import file_sha256, read_description, require_corpus
from retrieval.types import IndexFolderError

FORMAT = 1
METADATA = "metadata.json"
IndexKind = Literal["bm25", "dense_flat", "dense_fp16", "dense_sq8", "dense_hnsw", "dense_ivfpq"]


@dataclass(frozen=True)
class EncoderConfig:
    """Options of the text encoder: model, prefixes, pooling and lengths. Stored in the index, so that queries are
    encoded as the passages were.

    For e5: ``query_prefix: "query: "``, ``passage_prefix: "passage: "`` (with the blank), mean pooling, 256 tokens,
    as in Search-R1's search/index_builder.py.

    Args:
        model: Hugging Face folder (or hub name) of a text encoder.
        max_length: tokens per text; longer texts are cut.
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
    """Options of Faiss HNSW: links per node, and the search width while building and while searching.

    m = 64, ef_search = 64 found at least 99.5 % of the exact top 3 among 100,000 passages.
    """

    m: PositiveInt = 64
    ef_construction: PositiveInt = 200
    ef_search: PositiveInt = 64

    def __post_init__(self) -> None:
        if min(self.m, self.ef_construction, self.ef_search) < 2:
            raise ValueError(f"hnsw: m, ef_construction and ef_search must be at least 2; found {self}")


@dataclass(frozen=True)
class IVFPQConfig:
    """Options of Faiss IVF with product quantisation, which divides the corpus into lists.

    The corpus is divided into lists. A vector is rotated at random and stored in a few bytes. The best candidates are
    ranked again by their vectors on disk.

    Args:
        lists: by default a power of two near 4 sqrt(passages).
        code_bytes: bytes per vector; must divide its dimension. By default a quarter of it.
        probes: lists per search.
        candidates: candidates per query that are ranked again.
    """

    lists: PositiveInt | None = None
    code_bytes: PositiveInt | None = None
    probes: PositiveInt = 64
    candidates: PositiveInt = 200


@dataclass(frozen=True)
class IndexMetadata:
    """The content of an index folder's ``metadata.json``: kind, corpus, settings, versions and files."""

    kind: IndexKind
    corpus: str  # path at build time, for messages
    corpus_bytes: int
    corpus_sha256: str
    passages: int
    settings: dict[str, Any]  # other settings of the index: encoder, hnsw, ivfpq
    versions: dict[str, str]
    seconds: float = 0.0
    skipped: int = 0  # malformed rows of the corpus, skipped
    format: int = FORMAT
    recall: float | None = None  # of the exact best 3, over sampled queries, or None if exact or not measured
    files: dict[str, int] = field(default_factory=dict)  # size of each file at build time

    def require_settings(self) -> None:
        """Check that the index's settings fit its kind. Raises ValueError or TypeError."""
        for name, config in (("encoder", EncoderConfig), ("hnsw", HNSWConfig), ("ivfpq", IVFPQConfig)):
            needed = name == self.kind.removeprefix("dense_") or (name == "encoder" and self.kind != "bm25")
            if needed or self.settings.get(name) is not None:
                config(**self.settings.get(name, {}))
        if self.kind not in get_args(IndexKind) or not isinstance(self.passages, int):
            raise ValueError(f"kind {self.kind!r}, {self.passages!r} passages")


def read_metadata(folder: str | Path) -> IndexMetadata:
    """Return the metadata of an index folder. Raises IndexFolderError if the index or one of its files is
    incomplete."""
    path = Path(folder) / METADATA
    if not path.is_file():
        interrupted = "has no metadata.json, because it is not an index, or its build was interrupted"
        state = interrupted if path.parent.is_dir() else "missing"
        raise IndexFolderError(f"index {folder}: {state}; build it with `python -m retrieval build`")
    values = read_description(path, "format")
    if values["format"] != FORMAT:
        raise IndexFolderError(f"{path}: format {values['format']}, this version reads {FORMAT}; build the index again")
    try:
        metadata = IndexMetadata(**values)
        metadata.require_settings()
    except (ValueError, TypeError, AttributeError) as error:
        raise IndexFolderError(f"{path}: not an index description ({error}); build the index again") from error
    for name, size in metadata.files.items():
        file = path.parent / name
        left = file.stat().st_size if file.is_file() else None
        if left != size:
            state = "missing" if left is None else f"{left} bytes long"
            raise IndexFolderError(f"{file}: {state}, {size} bytes when it was built; build the index again")
    return metadata


def check_index(folder: str | Path, corpus: str | Path | None = None) -> IndexMetadata:
    """Return the metadata of an index folder, and check that the index was built from ``corpus``, if given. Raises
    IndexFolderError.
    """
    metadata = read_metadata(folder)
    if corpus is None:
        return metadata
    path = require_corpus(corpus)
    size = path.stat().st_size
    if size != metadata.corpus_bytes or file_sha256(path) != metadata.corpus_sha256:
        raise IndexFolderError(
            f"index {folder} was built from another corpus than {path}: it has {metadata.passages} passages of "
            f"{metadata.corpus} ({metadata.corpus_bytes} bytes, sha256 {metadata.corpus_sha256[:12]}), the file has "
            f"{size} bytes; build an index from {path}, or give the corpus that belongs to the index"
        )
    return metadata


def how_read(metadata: IndexMetadata) -> dict[str, Any]:
    """Return the settings of an index that decided which passages were read from the corpus file."""
    return {name: metadata.settings[name] for name in ("columns", "skip_malformed") if name in metadata.settings}
