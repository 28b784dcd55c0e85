"""Rows about the machine: driver, products in bfloat16, Triton, shared memory. Imports only torch.

On a machine with a GPU, the last step of ``make setup`` runs these rows and prints "ready" if they pass.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from benchmarks.gpu.frame import Finding, Setting

DRIVERS = {"12": 525, "13": 580}  # oldest Linux driver by CUDA's major version (CUDA Toolkit release notes)
CAPABILITY = (8, 0)  # Ampere, the first with bfloat16
BF16_ERROR = 0.01  # error of a product: bfloat16 rounds to 2^-9, 0.2 %
PEAK_SHARE = 0.3  # least share of the data sheet's speed that a plain product reaches
GB = 1e9


def driver(setting: Setting) -> Finding:
    import torch

    found = driver_version()
    if torch.version.cuda is None:
        return Finding(
            False,
            f"driver {found}, but torch {torch.__version__} is a build for the processor",
            "remove .venv and any PIP_FIND_LINKS or PIP_INDEX_URL that serves CPU wheels, then make setup",
        )
    needed = DRIVERS.get(torch.version.cuda.partition(".")[0])
    wanted = f"torch {torch.__version__} is for CUDA {torch.version.cuda}: driver {needed or 'unknown'} or later"
    if not torch.cuda.is_available():
        return Finding(
            False,
            f"driver {found}, no GPU that torch can use; {wanted}",
            "update the driver (nvidia-smi shows it), look at CUDA_VISIBLE_DEVICES, or FORCE_CPU=1 make setup",
        )
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    figure = f"{name}, driver {found}; {wanted}"
    if capability < CAPABILITY:
        text = "compute capability {}.{}, 8.0 expected (bfloat16)".format(*capability)
        return Finding(False, f"{name}: {text}", "take a GPU of the Ampere generation or later")
    return Finding(True, figure)


def driver_version() -> str:
    """Return the driver version from nvidia-smi, else from the kernel module; "not found" without one."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    module = Path("/proc/driver/nvidia/version")
    told = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", module.read_text()) if module.exists() else None
    return told[1] if told else "not found"


def shared_memory(setting: Setting) -> Finding:
    """Check the shared memory, through which weights go in the engine's type if they do not go from GPU to GPU."""
    from benchmarks.gpu.shapes import shape_of
    from experiments.registry.shapes import Dimensions

    needed = (4 if setting.cpu else 2) * Dimensions.of(shape_of(setting)).parameters + (16 << 20)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    size = f"--shm-size={4 * needed / GB:.0f}g"
    return Finding(
        free >= needed,
        f"{free / GB:.2f} GB free, {needed / GB:.2f} expected for the weights of {setting.model}",
        f"docker run {size} or --ipc=host; elsewhere mount -o remount,size=50% /dev/shm. Else weights go by the disk",
    )


def bf16_product(setting: Setting) -> Finding:
    """Check the first rows against float64, and time a large product."""
    import torch

    device, n = ("cpu", 256) if setting.cpu else ("cuda", 8192)
    torch.manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    expected = a[:64].double() @ b.double()
    error = float(((a @ b)[:64].double() - expected).norm() / expected.norm())
    figure = f"off by {error:.2%} of {BF16_ERROR:.0%} at most"
    if error > BF16_ERROR:
        return Finding(False, figure, "this device computes wrong products: another device, another driver")
    if setting.cpu:
        return Finding(True, figure)
    from benchmarks.gpu.shapes import chip_here

    repeats = 30
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    speed, chip = repeats * 2 * n**3 / (time.perf_counter() - began), chip_here()
    figure += f", {speed / 1e12:.0f} TFLOP/s" + (f" of {chip.flops / 1e12:.0f}" if chip else "")
    slow = chip is not None and speed < PEAK_SHARE * chip.flops
    return Finding(not slow, figure, "see with nvidia-smi what else runs, the power limit and the clocks")


def triton_compile(setting: Setting) -> Finding:
    """Check torch.compile of a row-wise function: on CUDA this is Triton, which needs a C compiler and Python.h."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 1000, device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).softmax(-1)

    began = time.perf_counter()
    found = torch.compile(function)(x)
    seconds = time.perf_counter() - began
    error = float((found - function(x)).abs().max())
    figure = f"compiled in {seconds:.1f} s, off by {error:.0e}"
    return Finding(error < 1e-5, figure, "remove ~/.cache and /tmp/torchinductor_*, and try again")
