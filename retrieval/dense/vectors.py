"""Passages' vectors on disk: unit vectors as 16-bit floats, in files of 100,000 rows that are written one by one.

    vectors/
        vectors.json        of what: corpus (sha256) and how it was read, encoder, passages, dimension, rows of a file
        shard-00000.npy     [rows, dimension] float16, row by row the passages of the corpus

A killed encoding goes on behind its last whole file.
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

ROWS = 100_000  # of a file: 150 MB at 768 numbers
DESCRIPTION = "vectors.json"
_ENCODE_AT_ONCE = 4096  # passages; bounds the memory for texts


class VectorShards:
    """A whole folder of vectors, opened. Raises IndexFolderError when it is none, or not whole."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.described = read_description(self.folder / DESCRIPTION, "corpus", "passages", "rows")
        if "dimension" not in self.described:  # written last
            raise IndexFolderError(f"{folder}: not all vectors are there; let the build that writes them end")
        self.dimension: int = self.described["dimension"]
        files = shard_files(self.folder, self.described["passages"], self.described["rows"])
        try:
            self._parts = [np.load(path, mmap_mode="r") for path, _ in files]
        except (OSError, ValueError) as error:
            raise IndexFolderError(
                f"{folder}: not all vectors are there ({error}); run the same command again"
            ) from error
        shapes = [(len(rows), self.dimension) for _, rows in files]
        if [part.shape for part in self._parts] != shapes:
            raise IndexFolderError(f"{folder}: the files hold other rows than {DESCRIPTION} says; build it anew")

    def __len__(self) -> int:
        return self.described["passages"]

    def __iter__(self) -> Iterator[np.ndarray]:
        """[rows, dimension] float32, file by file."""
        for part in self._parts:
            yield np.asarray(part, dtype=np.float32)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """[len(numbers), dimension] float32."""
        files, within = np.divmod(numbers, self.described["rows"])
        found = np.empty((len(numbers), self.dimension), dtype=np.float32)
        places = [(self._parts[file], np.flatnonzero(files == file)) for file in np.unique(files)]
        for part, at in places:
            _prefetch(part, within[at])
        for part, at in places:
            found[at] = part[within[at]]
        return found


def _prefetch(part: np.memmap, rows: np.ndarray) -> None:
    """Let the disk read these rows side by side: a page that is missed is waited for before the next is asked for."""
    size, mapped = part.strides[0], cast("mmap.mmap", part.base)
    for begin in (part.offset + rows * size).tolist():
        page = begin - begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, page, begin + size - page)


def shard_files(folder: Path, passages: int, rows: int) -> list[tuple[Path, range]]:
    """Each file and the passages whose vectors it holds."""
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
    """Encode what is not there yet, a process for each GPU where there are several; memory of one file each.

    Args:
        store: folder of the ``PassageStore``.
        corpus: which one (its sha256), and how it was read; vectors of another one or encoder are removed first.
        rows: of a file: what a kill loses at most, for each process.
        devices: one for each process; by default all GPUs where ``device`` is auto, else that one.
    """
    chosen = list(devices) if devices else devices_of(device)
    with _writing(folder, len(PassageStore(store)), rows, corpus, encoder) as (missing, progress):
        if missing and len(chosen) == 1:
            encode = TextEncoder(encoder, threads=threads, device=chosen[0])
            for path, part in missing:
                progress.add(_encode(encode, PassageStore(store), path, part))
        elif missing:
            # A process keeps its encoder; which device is its own it learns from a queue.
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
                    f"an encoder on {', '.join(chosen)} has died (out of memory?); make encoder.batch_size smaller and "
                    "run the same command again, it goes on behind the vectors that are written"
                ) from error
    return VectorShards(folder)


def copy_vectors(
    index: faiss.Index, folder: Path, corpus: str, encoder: EncoderConfig, rows: int = ROWS
) -> VectorShards:
    """The vectors of an exact index, as ``encode_corpus`` would leave them."""
    with _writing(folder, index.ntotal, rows, corpus, encoder) as (missing, progress):
        for path, part in missing:
            progress.add(_save(path, index.reconstruct_n(part.start, len(part)).astype(np.float16)))
    return VectorShards(folder)


@contextmanager
def _writing(
    folder: Path, passages: int, rows: int, corpus: str, encoder: EncoderConfig
) -> Iterator[tuple[list[tuple[Path, range]], _Progress]]:
    """The files that are still to be written, and who is told of each. Files of the same passages and encoder stay,
    others are removed. When the block ends, all must be there."""
    settings = {k: v for k, v in asdict(encoder).items() if k != "batch_size"}  # which changes speed alone
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
            print(f"{folder}: vectors of another {changed} are removed", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        folder.mkdir()
        write_description(described, wanted)
    files = shard_files(folder, passages, rows)
    missing = [(path, part) for path, part in files if not path.is_file()]
    kept = passages - sum(len(part) for _, part in missing)
    if kept and missing:
        print(f"vectors: {kept:,} of {passages:,} are there already", file=sys.stderr, flush=True)
    yield missing, _Progress(passages, kept)
    write_description(described, {**wanted, "dimension": int(np.load(files[0][0], mmap_mode="r").shape[1])})


def _encode(encode: TextEncoder, store: PassageStore, path: Path, passages: range) -> int:
    vectors = np.empty((len(passages), encode.dimension), dtype=np.float16)
    for start in range(0, len(passages), _ENCODE_AT_ONCE):
        part = passages[start : start + _ENCODE_AT_ONCE]
        vectors[start : start + len(part)] = encode.encode_passages([store[row].contents for row in part])
    return _save(path, vectors)


def _save(path: Path, vectors: np.ndarray) -> int:
    """Write a file that is whole or not there. Returns how many vectors it holds."""
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


_worker: tuple[TextEncoder, PassageStore] | None = None  # of a process of its own


def _start_worker(store: Path, encoder: EncoderConfig, threads: int, waiting: Any) -> None:
    global _worker
    _worker = (TextEncoder(encoder, threads=threads, device=waiting.get()), PassageStore(store))


def _work(path: Path, passages: range) -> int:
    assert _worker is not None
    return _encode(*_worker, path, passages)


class _Progress:
    """A line for each file: how much is done, and how long the rest will take."""

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
