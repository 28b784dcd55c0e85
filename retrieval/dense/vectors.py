"""Vectors of passages on disk: unit vectors as 16-bit floats, in files of 100,000 rows.

    vectors/
        vectors.json        corpus (sha256) and how it was read, encoder, passages, dimension, rows per file
        shard-00000.npy     [rows, dimension] float16, in the order of the corpus

After a kill the encoding continues behind the last complete file.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np

from retrieval.corpus import PassageStore, read_description, write_description
from retrieval.dense.encoder import TextEncoder, devices_of
from retrieval.index_config import EncoderConfig
from retrieval.types import IndexFolderError

ROWS = 100_000  # per file: 150 MB at dimension 768
DESCRIPTION = "vectors.json"
_ENCODE_AT_ONCE = 4096  # passages at once, which limits the memory for texts


class VectorShards:
    """Reads a complete folder of passage vectors, file by file or by row number. Raises IndexFolderError if the folder
    is incomplete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.described = read_description(self.folder / DESCRIPTION, "corpus", "passages", "rows")
        if "dimension" not in self.described:  # written last
            raise IndexFolderError(f"{folder}: vectors are missing; wait for the build that writes them")
        self.dimension: int = self.described["dimension"]
        files = shard_files(self.folder, self.described["passages"], self.described["rows"])
        try:
            self._parts = [np.load(path, mmap_mode="r") for path, _ in files]
        except (OSError, ValueError) as error:
            raise IndexFolderError(f"{folder}: vectors are missing ({error}); run the same command again") from error
        shapes = [(len(rows), self.dimension) for _, rows in files]
        if [part.shape for part in self._parts] != shapes:
            raise IndexFolderError(f"{folder}: the files have other rows than {DESCRIPTION}; build it again")

    def __len__(self) -> int:
        return self.described["passages"]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the vectors of each file, [rows, dimension] float32."""
        for part in self._parts:
            yield np.asarray(part, dtype=np.float32)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the vectors with the given row numbers, [len(numbers), dimension] float32."""
        files, within = np.divmod(numbers, self.described["rows"])
        found = np.empty((len(numbers), self.dimension), dtype=np.float32)
        places = [(self._parts[file], np.flatnonzero(files == file)) for file in np.unique(files)]
        for part, at in places:
            _prefetch(part, within[at])
        for part, at in places:
            found[at] = part[within[at]]
        return found


def _prefetch(part: np.memmap, rows: np.ndarray) -> None:
    """Let the disk read the vectors with these row numbers in parallel. Without it page faults are served one after the
    other.
    """
    size, mapped = part.strides[0], cast("mmap.mmap", part.base)
    for begin in (part.offset + rows * size).tolist():
        page = begin - begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, page, begin + size - page)


def shard_files(folder: Path, passages: int, rows: int) -> list[tuple[Path, range]]:
    """Return the path of each vector file, and the range of its passages."""
    starts = range(0, passages, rows)
    return [(folder / f"shard-{i:05d}.npy", range(s, min(s + rows, passages))) for i, s in enumerate(starts)]


def encode_corpus(
    store: Path,
    corpus: str,
    folder: Path,
    encoder: EncoderConfig,
    *,
    threads: int = 1,
    device: str = "auto",
    rows: int = ROWS,
    devices: Sequence[str] | None = None,
) -> VectorShards:
    """Encode the passages whose vectors are missing on disk, and return all vectors. Uses one process per GPU, and
    memory for one file each.

    Args:
        store: folder of the ``PassageStore``.
        corpus: its sha256, and how it was read. Vectors of another corpus or encoder are removed first.
        rows: rows per file, which a kill loses at most, for each process.
        devices: one per process. By default ``device``, or all GPUs if that is auto.
    """
    chosen = list(devices) if devices else devices_of(device)
    with _writing(folder, len(PassageStore(store)), rows, corpus, encoder) as (missing, progress):
        if missing and len(chosen) == 1:
            encode = TextEncoder(encoder, threads=threads, device=chosen[0])
            for path, part in missing:
                progress.add(_encode(encode, PassageStore(store), path, part))
        elif missing:
            # A process keeps its encoder, and gets its device from a queue.
            context = get_context("spawn")
            waiting = context.Queue()
            for name in chosen:
                waiting.put(name)
            start = (store, encoder, threads, waiting)
            try:
                with ProcessPoolExecutor(len(chosen), context, _start_worker, start) as workers:
                    for done in as_completed([workers.submit(_work, path, part) for path, part in missing]):
                        progress.add(done.result())
            except BrokenProcessPool as error:
                raise IndexFolderError(
                    f"an encoder on {', '.join(chosen)} has died (out of memory?); lower encoder.batch_size and run "
                    "the same command again, which continues after the written vectors"
                ) from error
    return VectorShards(folder)


def copy_vectors(
    index: faiss.Index, folder: Path, corpus: str, encoder: EncoderConfig, rows: int = ROWS
) -> VectorShards:
    """Copy the vectors of an exact Faiss index to files, in the format of ``encode_corpus``, and return them."""
    with _writing(folder, index.ntotal, rows, corpus, encoder) as (missing, progress):
        for path, part in missing:
            progress.add(_save(path, index.reconstruct_n(part.start, len(part)).astype(np.float16)))
    return VectorShards(folder)


@contextmanager
def _writing(
    folder: Path, passages: int, rows: int, corpus: str, encoder: EncoderConfig
) -> Iterator[tuple[list[tuple[Path, range]], _Progress]]:
    """Yield the missing vector files and a progress report. At the end of the ``with`` block all files must exist.

    Keeps files of the same passages and encoder, and removes others.
    """
    settings = {k: v for k, v in asdict(encoder).items() if k != "batch_size"}  # changes only speed
    wanted = {"format": 1, "corpus": corpus, "encoder": settings, "passages": passages, "rows": rows}
    described = folder / DESCRIPTION
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = read_description(described)
    except IndexFolderError:
        found = {}
    if {key: found.get(key) for key in wanted} != wanted:
        if found:
            changed = next(key for key in wanted if found.get(key) != wanted[key])
            print(f"{folder}: removing vectors of another {changed}", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        folder.mkdir()
        write_description(described, wanted)
    files = shard_files(folder, passages, rows)
    missing = [(path, part) for path, part in files if not path.is_file()]
    kept = passages - sum(len(part) for _, part in missing)
    if kept and missing:
        print(f"vectors: {kept:,} of {passages:,} exist already", file=sys.stderr, flush=True)
    yield missing, _Progress(passages, kept)
    write_description(described, {**wanted, "dimension": int(np.load(files[0][0], mmap_mode="r").shape[1])})


def _encode(encode: TextEncoder, store: PassageStore, path: Path, passages: range) -> int:
    vectors = np.empty((len(passages), encode.dimension), dtype=np.float16)
    for start in range(0, len(passages), _ENCODE_AT_ONCE):
        part = passages[start : start + _ENCODE_AT_ONCE]
        vectors[start : start + len(part)] = encode.encode_passages([store[row].contents for row in part])
    return _save(path, vectors)


def _save(path: Path, vectors: np.ndarray) -> int:
    """Write vectors to a file atomically. Returns their number."""
    temporary = path.with_suffix(".part")
    try:
        with temporary.open("wb") as file:
            np.save(file, vectors)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise IndexFolderError(f"{path}: the vectors could not be written ({error}); is the disk full?") from error
    temporary.replace(path)
    return len(vectors)


_worker: tuple[TextEncoder, PassageStore] | None = None  # of a worker process


def _start_worker(store: Path, encoder: EncoderConfig, threads: int, waiting: Any) -> None:
    global _worker
    _worker = (TextEncoder(encoder, threads=threads, device=waiting.get()), PassageStore(store))


def _work(path: Path, passages: range) -> int:
    assert _worker is not None
    return _encode(*_worker, path, passages)


class _Progress:
    """Prints one line per written vector file: the share done, and the time left."""

    def __init__(self, passages: int, kept: int) -> None:
        self._passages, self._done, self._new = passages, kept, 0
        self._began = time.monotonic()

    def add(self, count: int) -> None:
        self._done, self._new = self._done + count, self._new + count
        left = (time.monotonic() - self._began) / self._new * (self._passages - self._done)
        print(
            f"vectors: {self._done:,} of {self._passages:,} ({self._done / self._passages:.1%}), "
            f"{left / 60:.0f} min left",
            file=sys.stderr, flush=True,
        )  # fmt: skip
