"""A side's process: it has imported everything once, and answers each case from a fork of itself."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from benchmarks.against_trl.cases import Case, Inputs

Measure = Callable[[Case, Path, Inputs], dict[str, Any]]
MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(measure: Measure, about: dict[str, str]) -> None:
    """Answer over the socket named on the command line until the other side closes it.

    Args:
        measure: called in a fork for every case, so that each has a fresh heap and a peak of its own.
        about: sent first: names and versions.
    """
    with Client(sys.argv[1], "AF_UNIX") as parent:
        parent.send(about)
        while (asked := _next(parent)) is not None:
            parent.send(_in_fork(measure, *asked))


def _next(parent: Connection) -> tuple[Case, Path] | None:
    try:
        return parent.recv()
    except EOFError:
        return None


def _in_fork(measure: Measure, case: Case, folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, measure, case, folder))
    process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        result = {"error": "the measuring process died"}
    process.join()
    return result


def _answer(pipe: Connection, measure: Measure, case: Case, folder: Path) -> None:
    if case.return_memory:
        ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 1 << 20)
    before = peak_mebibytes()
    try:
        found = measure(case, folder, Inputs.read(folder))
        pipe.send({**found, "mebibytes": peak_mebibytes() - before})
    except BaseException:  # whatever ends the case is for the reader of the benchmark
        pipe.send({"error": traceback.format_exc()})
