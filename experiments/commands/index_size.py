"""``make size`` of a search index: memory, disk and speed of every kind, before anything is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.registry.errors import ExperimentError
from experiments.stages.graph import Stage
from retrieval.dense import sizes
from retrieval.index import HNSWConfig, IVFPQConfig

BATCH = 64  # queries
GB = 1e9
# of corpora and encoders that are asked for before they are there: passages, bytes; numbers of a vector
CORPORA = {"wiki-18.jsonl": (21_015_324, 14_393_573_105)}
DIMENSIONS = {"e5-small-v2": 384, "e5-base-v2": 768, "e5-large-v2": 1024, "bge-base-en-v1.5": 768, "bge-m3": 1024}
ROW = 45  # bytes that the index adds to a passage: its row, its offset, keys
LUCENE = 0.16  # of the text: 2.3 GB of wiki-18, as released


def table(stage: Stage, root: Path) -> tuple[str, list[list[str]]]:
    """A title, and the rows, their head first: every kind, with the stage's own marked.

    Raises:
        ExperimentError: nothing is known of the corpus or the encoder.
    """
    arguments: dict[str, Any] = stage.config["task"]["init_args"]
    passages, size = _corpus(root / arguments["corpus"], stage.name)
    threads, own, encoder = int(arguments.get("threads", 1)), arguments.get("kind", "bm25"), arguments.get("encoder")
    text = (size + ROW * passages) / GB
    found = [["", "memory, GB", "disk, GB", f"s for {BATCH} queries, {threads} threads"]]
    found.append(["bm25", str(arguments.get("java_heap", "1g")), _gb(text + LUCENE * size / GB), "-"])
    if encoder is not None:
        dimension = _dimension(root / encoder["model"], stage.name)
        hnsw, ivfpq = HNSWConfig(**(arguments.get("hnsw") or {})), IVFPQConfig(**(arguments.get("ivfpq") or {}))
        for kind in sizes.DENSE:
            memory = sizes.index_bytes(kind, passages, dimension, hnsw, ivfpq) / GB
            disk = text + memory + sizes.kept_bytes(kind, passages, dimension) / GB
            seconds = sizes.search_seconds(kind, passages, dimension, BATCH, threads, hnsw, ivfpq)
            found.append([kind, _gb(memory), _gb(disk), f"{seconds:.2g}"])
    title = f"{stage.name}: {passages:,} passages, {size / GB:.1f} GB of text (* is its kind)"
    return title, [[f"{row[0]} *" if row[0] == own else row[0], *row[1:]] for row in found]


def _gb(size: float) -> str:
    return f"{size:.1f}" if size >= 1 else f"{size:.2g}"


def _corpus(path: Path, name: str) -> tuple[int, int]:
    """Passages and bytes; of a file that is there, passages by the length of its first lines."""
    if path.is_file() and path.suffix == ".jsonl":
        size = path.stat().st_size
        with path.open("rb") as file:
            lines = [len(line) for _, line in zip(range(1000), file, strict=False)]
        return round(size * len(lines) / max(sum(lines), 1)), size
    if path.name in CORPORA:
        return CORPORA[path.name]
    raise ExperimentError(
        f"'{name}': nothing is known of the corpus {path.name}, which is no .jsonl file that is there"
    )


def _dimension(folder: Path, name: str) -> int:
    file = folder / "config.json"
    if file.is_file():
        return int(json.loads(file.read_text())["hidden_size"])
    if folder.name in DIMENSIONS:
        return DIMENSIONS[folder.name]
    raise ExperimentError(f"'{name}': nothing is known of the encoder {folder.name}, and it is not there")
