"""Rows of a table, each measured in a child process, so that a crash or a hang costs only one row."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from common.errors import signal_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = __name__.rpartition(".")[0]
OUT_OF_MEMORY = "see with nvidia-smi what else is on the GPU; if nothing is, take a smaller --model"
CPU_PATIENCE = 4  # times the limit
SEE_LOG = "read the log that is named below the table"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings for every row.

    Attributes:
        folder: for models, checkpoints and logs; all rows share it.
        model: name in ``experiments.registry.shapes``.
        cpu: small shapes, on the processor.
    """

    folder: str
    model: str = "qwen3-0.6b"
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one row: whether it passed (None: skipped), its figure or why it was skipped, and the cure for a
    failure."""

    ok: bool | None
    figure: str
    cure: str = ""

    @property
    def word(self) -> str:
        return "skipped" if self.ok is None else "PASS" if self.ok else "FAIL"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: printed name, also for ``--only``.
        measure: a function ``(Setting) -> Finding`` that the child imports: module and name, separated by a colon. A
            module without a dot is one of this package.
        tier: A runs without vLLM.
        group: adjacent rows of one group share a process and its state (an engine, a trained model) until one crashes.
        of: name of the row whose work this row reads; if that row crashes, this row is skipped.
        needs: packages without which the row is skipped.
        gpus: number of GPUs it needs, without ``--cpu``.
        not_on_cpu: why the row is skipped with ``--cpu``.
        limit_s: seconds after which the row has failed.
    """

    name: str
    measure: str
    tier: str
    group: str
    needs: tuple[str, ...] = ()
    gpus: int = 1
    not_on_cpu: str = ""
    of: str = ""
    limit_s: float = 240.0

    def skipped(self, setting: Setting, gpus: int) -> str | None:
        """Return why the row is skipped, or None if it is measured.

        Args:
            gpus: number of GPUs that torch can use.
        """
        if setting.cpu and self.not_on_cpu:
            return self.not_on_cpu
        if not setting.cpu and self.gpus > gpus:
            return f"needs {self.gpus} GPU{'s' * (self.gpus > 1)}; torch finds {gpus}"
        missing = [name for name in self.needs if find_spec(name) is None]
        return f"{', '.join(missing)} is not installed (make setup)" if missing else None


def results(rows: Sequence[Row], setting: Setting, gpus: int) -> Iterator[tuple[Row, Finding]]:
    """Yield the finding of each row as soon as it is known."""
    log = Path(setting.folder) / "log.txt"
    for _, neighbours in groupby(rows, key=lambda row: row.group):
        group = list(neighbours)
        why = {row: row.skipped(setting, gpus) for row in group}
        found = _findings([row for row in group if why[row] is None], setting, log)
        for row in group:
            yield row, next(found) if (reason := why[row]) is None else Finding(None, reason)


def _findings(rows: Sequence[Row], setting: Setting, log: Path) -> Iterator[Finding]:
    """Yield one finding per row. After a crash, another child continues with the remaining rows."""
    left = list(rows)
    while left:
        with log.open("a") as stderr:
            began = stderr.tell()
            child = _start(left, setting, stderr)
            try:
                while left:
                    row = left.pop(0)
                    limit_s = row.limit_s * (CPU_PATIENCE if setting.cpu else 1)
                    line, late = _answer(child, limit_s)
                    if line:
                        yield Finding(**json.loads(line))
                        continue
                    end = f"no answer within {limit_s:g} s" if late else _end(child, log, began)
                    yield Finding(False, end, OUT_OF_MEMORY if "out of memory" in end.lower() else SEE_LOG)
                    while left and left[0].of == row.name:
                        left.pop(0)
                        yield Finding(False, f"not measured: '{row.name}' has failed", "that one first")
                    break
            finally:
                _kill(child)


def _answer(child: subprocess.Popen[str], limit_s: float) -> tuple[str, bool]:
    """Return the child's next answer, "" at its end, and whether the child was killed because it took too long."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(child)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        assert child.stdout is not None
        return child.stdout.readline(), late.is_set()
    finally:
        timer.cancel()


def _start(rows: Sequence[Row], setting: Setting, stderr: IO[str]) -> subprocess.Popen[str]:
    functions = [row.measure if "." in row.measure else f"{PACKAGE}.{row.measure}" for row in rows]
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if setting.cpu:
        # Some virtual machines advertise AMX and cannot run it.
        small = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
        environment = small | environment | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, json.dumps(asdict(setting)), *functions],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def _end(child: subprocess.Popen[str], log: Path, began: int) -> str:
    code = child.wait()
    with log.open() as file:
        file.seek(began)
        lines = [line.strip() for line in file if line.strip()]
    how = f"killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{how}: {lines[-1]}" if lines else how


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and the processes it started (engines)."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def serve() -> None:
    """Measure the rows in this child process, and answer each with one line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print into the answers
    words: dict[str, Any] = json.loads(sys.argv[1])
    setting, code = Setting(**words), 0
    try:
        for path in sys.argv[2:]:
            module, _, name = path.partition(":")
            began = time.perf_counter()
            finding = getattr(importlib.import_module(module), name)(setting)
            print(f"{name}: {time.perf_counter() - began:.1f} s: {finding}", file=sys.stderr, flush=True)
            print(json.dumps(asdict(finding)), file=answers, flush=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # whatever threads and libraries still hold
