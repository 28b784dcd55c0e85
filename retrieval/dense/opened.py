"""Opens the dense part of an index folder, with the settings that its metadata holds or a server gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.dense.searcher import DenseSearcher
from retrieval.dense.vectors import VectorShards
from retrieval.index import EncoderConfig, IndexKind
from retrieval.types import Progress


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
    """
    Args:
        settings: of the index's metadata.
        encoder: where it lies now; None: where it lay when the index was built.
        ef_search, probes: None: the index's own.

    Raises IndexFolderError, see ``DenseSearcher``.
    """
    values = dict(settings["encoder"])
    values["model"] = encoder or values["model"]
    options: dict[str, Any] = {}
    if kind == "dense_hnsw":
        options["ef_search"] = ef_search or settings.get("hnsw", {}).get("ef_search")
    if kind == "dense_ivfpq":
        own = settings["ivfpq"]
        exact = folder / "vectors"  # an adopted file has none
        options |= {"probes": probes or own["probes"], "candidates": own["candidates"]}
        options["exact"] = VectorShards(exact) if exact.is_dir() else None
    return DenseSearcher(
        folder / "faiss.index", EncoderConfig(**values),
        threads=threads, device=device, gpu=gpu, progress=progress, **options,
    )  # fmt: skip
