"""Estimates the memory of an index before it is built, and reads this machine's free memory."""

from __future__ import annotations

import math
from pathlib import Path

from retrieval.index_config import HNSWConfig, IndexKind, IVFPQConfig
from retrieval.types import IndexFolderError

DENSE: tuple[IndexKind, ...] = ("dense_flat", "dense_hnsw", "dense_fp16", "dense_sq8", "dense_ivfpq")
GRAPH_FROM = 4096  # number of lists from which a graph finds the nearest ones
GRAPH_LINKS = 32
_TRAIN_PER_LIST = 50  # vectors; Faiss wants 39
_ID = 8  # bytes of an id
_USABLE = 0.95  # share of the free memory; encoder and server need the rest


def lists_of(config: IVFPQConfig, passages: int) -> int:
    """Return the number of lists of an IVF index: the configured one, or a power of two near 4 sqrt(passages) with
    enough training vectors.
    """
    if config.lists is not None:
        return config.lists
    wanted = max(1.0, min(4 * math.sqrt(passages), passages / _TRAIN_PER_LIST))
    return 2 ** round(math.log2(wanted))


def code_bytes_of(config: IVFPQConfig, dimension: int) -> int:
    return config.code_bytes or max(1, dimension // 4)


def training_vectors(config: IVFPQConfig, passages: int) -> int:
    return min(passages, max(_TRAIN_PER_LIST * lists_of(config, passages), 50_000))


def index_bytes(
    kind: IndexKind, passages: int, dimension: int, hnsw: HNSWConfig | None = None, ivfpq: IVFPQConfig | None = None
) -> int:
    """Return the size in bytes of a dense index (``faiss.index``), which a server keeps in memory."""
    numbers = passages * dimension
    if kind == "dense_hnsw":
        return 4 * numbers + passages * _links((hnsw or HNSWConfig()).m)
    if kind == "dense_ivfpq":
        config = ivfpq or IVFPQConfig()
        lists = lists_of(config, passages)
        graph = _links(GRAPH_LINKS) if lists >= GRAPH_FROM else 0
        codes = 4 * dimension * (256 + dimension)  # code books and rotation
        return passages * (code_bytes_of(config, dimension) + _ID) + lists * (4 * dimension + graph) + codes
    return {"dense_flat": 4, "dense_fp16": 2, "dense_sq8": 1}[kind] * numbers


def _links(m: int) -> int:
    """Return the bytes per vector that the links of an HNSW graph take. A vector has 2 m neighbours on the lowest level
    and m on each level above (one vector of m reaches the next level), and 12 bytes of bookkeeping.
    """
    return 4 * (2 * m + round(m / (m - 1))) + 12


def require_memory(kind: IndexKind, needed: int, passages: int, dimension: int) -> None:
    """Check that an index of ``needed`` bytes fits into the free memory. Raises IndexFolderError with the kinds that
    fit.
    """
    room = _USABLE * available_memory()
    if needed <= room:
        return
    sizes = {other: index_bytes(other, passages, dimension) for other in DENSE if other != kind}
    fitting = [f"{other} ({size / 1e9:.1f} GB)" for other, size in sizes.items() if size <= room]
    advice = f"kinds that fit: {', '.join(fitting)}" if fitting else "no kind fits this corpus"
    raise IndexFolderError(
        f"a {kind} index of {passages:,} passages takes {needed / 1e9:.1f} GB of memory, and this machine has "
        f"{room / 1e9:.1f} GB for it: every search would read from the disk; {advice}"
    )


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory usable without swapping: the kernel's estimate, within the limits of control groups
    (containers, Slurm).
    """
    lines = (proc / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    own = next((line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
    folder = groups / own.strip().lstrip("/")
    for group in (folder, *folder.parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text())
        except OSError:  # a group without limits, or of version 1
            continue
        cached = int(stat["active_file"]) + int(stat["inactive_file"])  # reclaimed on demand
        if limit != "max":
            free = min(free, int(limit) - used + cached)
    return max(free, 0)
