"""What the machine has, for options that depend on it: ``${per_device:GPU,CPU}``. Imports without torch."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from common.files import write_atomically
from experiments.registry.hardware import GPU_NAMES
from experiments.registry.shapes import GB, GPUSpec

CPUINFO = Path("/proc/cpuinfo")
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITH_AMX, WITHOUT_AMX = "DEFAULT", "AVX512_CORE_BF16"
CPU_EFFICIENCY = 0.6  # of the measured speed of products that training and rollouts reach together
TOLERANCE = 0.02  # of a bfloat16 result, relative to the largest value
# A product and an attention in bfloat16 against float32. Some processors crash here, so a child process runs it.
PROBE = f"""
import torch
torch.manual_seed(0)
x, y = torch.randn(64, 256), torch.randn(256, 64)
q, k, v = torch.randn(3, 1, 4, 64, 32).unbind(0)
attend = torch.nn.functional.scaled_dot_product_attention
for exact, found in (
    (x @ y, x.bfloat16() @ y.bfloat16()),
    (attend(q, k, v, is_causal=True), attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)),
):
    assert (exact - found.float()).abs().max() < {TOLERANCE} * exact.abs().max()
"""


_assumed: ContextVar[bool] = ContextVar("assumed_gpu", default=False)


@contextmanager
def assume_gpu() -> Iterator[None]:
    """Let ``accelerator: auto`` mean a GPU inside the block, to estimate the runs of another machine."""
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def device_of(accelerator: Any) -> Literal["gpu", "cpu"]:
    """Return the kind of device that ``trainer.accelerator`` trains on. ``auto``: a GPU if torch can use one."""
    if accelerator in GPU_NAMES:
        return "gpu"
    return "gpu" if accelerator in (None, "auto") and (_assumed.get() or _has_gpu()) else "cpu"


def _has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU and torch is a CUDA build."""
    try:
        build = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return "+cpu" not in build and not hidden and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def measured_cpu(dtype: str) -> GPUSpec:
    """Measure the speed of this machine's cores in two seconds: products of matrices as a small model has them, and
    sums. Returns it with the memory that is free now.

    Args:
        dtype: ``float32`` or ``bfloat16``.
    """
    import torch

    from retrieval.dense.sizes import available_memory

    torch.set_num_threads(cpu_cores())
    x, w = torch.randn(1024, 1024, dtype=getattr(torch, dtype)), torch.randn(1024, 1024, dtype=getattr(torch, dtype))
    whole = torch.randn(2**26)  # larger than any cache
    flops = 2 * 1024**3 / _seconds(lambda: x @ w)
    bandwidth = 4 * whole.numel() / _seconds(lambda: whole.sum())
    memory = available_memory()
    name = f"{cpu_cores()} CPU cores, {dtype}, {memory / GB:.0f} GB"
    return GPUSpec(name, memory, flops, bandwidth, overhead=1.5 * GB, efficiency=CPU_EFFICIENCY, is_cpu=True)


def _seconds(work: Callable[[], object]) -> float:
    """Return the median wall time of a call, over about a second."""
    work()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < 1.0:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def onednn_isa(cpuinfo: Path = CPUINFO) -> str:
    """Return the ``ONEDNN_MAX_CPU_ISA`` of stages: no AMX unless a trial shows that the processor runs it, because some
    virtual machines advertise AMX and cannot run it."""
    return WITH_AMX if _passes(cpuinfo, "amx_bf16", WITH_AMX) else WITHOUT_AMX


def cpu_has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor computes in bfloat16, by its flags and a trial. An answer is kept for this processor
    and version of torch."""
    return _passes(cpuinfo, "amx_bf16", WITH_AMX) or _passes(cpuinfo, "avx512_bf16", WITHOUT_AMX)


def _passes(cpuinfo: Path, flag: str, isa: str) -> bool:
    text = cpuinfo.read_text("utf-8", "replace") if cpuinfo.exists() else ""
    lines = dict.fromkeys(line for line in text.splitlines() if line.startswith(("model name", "flags")))
    if flag not in " ".join(lines).split():
        return False
    return _trial_passes(" ".join(lines) + importlib.metadata.version("torch"), os.environ.get(ISA_VARIABLE, isa))


@functools.cache
def _trial_passes(processor: str, isa: str) -> bool:
    kept = Path(tempfile.gettempdir(), f"compact-agents-bfloat16-{isa.lower()}-{os.getuid()}.json")
    try:
        known = json.loads(kept.read_text("utf-8"))
        if known["processor"] == processor:
            return bool(known["works"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    environment = os.environ | {ISA_VARIABLE: isa}
    tried = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=300, env=environment)
    works = tried.returncode == 0
    write_atomically(kept, json.dumps({"processor": processor, "works": works}))
    return works
