"""A side's process: it has imported everything once, and answers each request from a fork of itself."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.against_trl.cases import Case, Inputs

Function = Callable[..., dict[str, Any] | None]
Measure = Callable[[Case, Path, Inputs], dict[str, Any]]
MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def serve(functions: Mapping[str, Function], about: dict[str, str]) -> None:
    """Answer over the pipe whose file descriptor stands on the command line until its other end is closed.

    Args:
        functions: by the name they are asked for with ``(name, *arguments)``. Each call is made in a fork, so that it
            has a fresh heap and a peak of its own.
        about: sent first: names and versions.
    """
    with Connection(int(sys.argv[1])) as parent:
        parent.send(about)
        while (request := _next(parent)) is not None:
            name, *arguments = request
            parent.send(_in_fork(functions[name], arguments))


def with_peak(measure: Measure) -> Function:
    """``measure`` of a case and its folder, with ``mebibytes``: how far the peak of memory rose meanwhile."""

    def run(case: Case, folder: Path) -> dict[str, Any]:
        if case.return_memory:
            ctypes.CDLL(None).mallopt(MALLOC_MMAP_THRESHOLD, 1 << 20)
        inputs, before = Inputs.read(folder), peak_kibibytes()
        found = measure(case, folder, inputs)
        return found | {"mebibytes": (peak_kibibytes() - before) / 1024}

    return run


def peak_kibibytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _next(parent: Connection) -> tuple[Any, ...] | None:
    try:
        return parent.recv()
    except EOFError:
        return None


def _in_fork(function: Function, arguments: list[Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        result = {"error": "the measuring process died"}
    process.join()
    return result


def _answer(pipe: Connection, function: Function, arguments: list[Any]) -> None:
    try:
        pipe.send(function(*arguments) or {})
    except BaseException:  # whatever ends it is for the reader of the benchmark
        pipe.send({"error": traceback.format_exc()})
