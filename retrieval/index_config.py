"""Kinds of index, their configurations, and the description that each index folder holds (``metadata.json``)."""

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
