"""The process of a side: imports everything once and answers each request from a fork."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.against_trl.cases import Case, Inputs

Function = Callable[..., dict[str, Any] | None]
Measure = Callable[[Case, Path, Inputs], dict[str, Any]]
MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def serve(functions: Mapping[str, Function], about: dict[str, str]) -> None:
    """Answer the runner's requests until the runner closes the pipe. The command line gives the pipe's file descriptor.

    Args:
        functions: functions by request name, called with ``(name, *arguments)``. Each call runs in a fork, so that it
            has a fresh heap and its own peak.
        about: sent first: names and versions.
    """
    fork = multiprocessing.get_context("fork")
    with Connection(int(sys.argv[1])) as parent, contextlib.suppress(EOFError):
        parent.send(about)
        while True:
            name, *arguments = parent.recv()
            try:
                with ProcessPoolExecutor(1, mp_context=fork) as pool:
                    parent.send(pool.submit(functions[name], *arguments).result() or {})
            except Exception:  # the fork's error too, or that it died: for the reader of the benchmark
                parent.send({"error": traceback.format_exc()})


def with_peak(measure: Measure, case: Case, folder: Path) -> dict[str, Any]:
    """Run ``measure`` of a case and its folder; add ``mebibytes``, the rise of the memory peak."""
    if case.return_memory:
        ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 1 << 20)
    inputs, before = Inputs.read(folder), peak_kibibytes()
    found = measure(case, folder, inputs)
    return found | {"mebibytes": (peak_kibibytes() - before) / 1024}


def peak_kibibytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
