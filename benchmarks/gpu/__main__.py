"""GPU check: one command, one table, in less than ten minutes on one GPU (``make gpu-check``).

    python -m benchmarks.gpu [--model qwen3-0.6b] [--only ROW ...] [--cpu] [--markdown]

Models have random weights in the shape of a published model, so nothing is downloaded. LightningModules, RolloutSystem,
data module and Trainer are the project's. Tier A needs no vLLM, tier B does. A row prints PASS with its figure, FAIL
with figure and cure, or the reason for skipping it. The exit status is 1 if a row failed. docs/results/gpu.md lists the
expected result of each row.

``--cpu`` runs the same rows on small shapes on the processor. This shows that they run; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from benchmarks.gpu.frame import Finding, Row, Setting, results
from experiments.registry.shapes import MODELS

TRAINING, ENGINE = ("lightning", "transformers"), ("lightning", "vllm")
ON_GPU = "torch counts memory on a GPU only"
ROWS = (
    Row("driver", "machine:driver", "A", "machine", gpus=0, not_on_cpu="no GPU is asked for"),
    Row("/dev/shm", "machine:shared_memory", "A", "machine", gpus=0),
    Row("bf16 product", "machine:bf16_product", "A", "machine"),
    Row("Triton compile", "machine:triton_compile", "A", "machine", not_on_cpu="no Triton in the CPU build"),
    Row("packed = padded", "training:packed", "A", "equal", TRAINING),
    Row("LoRA, packed", "training:lora", "A", "equal", (*TRAINING, "peft")),
    Row("Liger = plain", "training:liger", "A", "equal", (*TRAINING, "liger_kernel"), not_on_cpu="CUDA kernels"),
    Row("chunked vocabulary", "training:chunked", "A", "step", TRAINING),
    Row("training step", "training:step", "A", "step", TRAINING),
    Row("peak memory", "training:peak", "A", "step", TRAINING, not_on_cpu=ON_GPU, of="training step"),
    Row("share of the vocabulary", "training:vocabulary", "A", "step", TRAINING, of="training step"),
    Row("training speed", "training:speed", "A", "step", TRAINING),
    Row("ZeRO-2 = plain", "training:zero2", "A", "zero", (*TRAINING, "deepspeed")),
    Row("ZeRO-3 = plain", "training:zero3", "A", "zero", (*TRAINING, "deepspeed")),
    Row("sequences at once", "rollouts:sequences", "B", "engine", ENGINE),
    Row("update between steps", "rollouts:between_steps", "B", "engine", ENGINE),
    Row("GRPO iterations", "rollouts:iterations", "B", "iterations", ENGINE),
    Row("engine beside the trainer", "rollouts:beside", "B", "iterations", ENGINE, of="GRPO iterations"),
    Row("push by IPC", "rollouts:pushed_by_ipc", "B", "iterations", ENGINE, of="GRPO iterations"),
    Row("sleep and wake", "rollouts:asleep", "B", "sleep", ENGINE),
    Row("resume", "rollouts:resumed", "B", "more", ENGINE),
    Row("one iteration ahead", "rollouts:ahead", "B", "more", ENGINE),
    Row("push by files", "rollouts:pushed_by_files", "B", "more", ENGINE, of="one iteration ahead"),
    Row("push by NCCL", "rollouts:pushed_by_nccl", "B", "nccl", ENGINE, gpus=2, not_on_cpu="needs 2 GPUs"),
)
WIDTH = max(len(row.name) for row in ROWS)


def shown(row: Row, finding: Finding, markdown: bool) -> str:
    cure = f"what to do: {finding.cure}" if finding.cure and not finding.ok else ""
    if markdown:
        cells = (row.tier, row.name, finding.word, "; ".join(filter(None, (finding.figure, cure))))
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    line = f"{row.tier}  {row.name:<{WIDTH}}  {finding.word:<7}  {finding.figure}"
    return f"{line}\n{'':{WIDTH + 5}}{cure}" if cure else line


def check(rows: Sequence[Row], setting: Setting, gpus: int, markdown: bool = False) -> int:
    """Print the table; return the exit status."""
    began, words = time.monotonic(), []
    if markdown:
        print("| tier | row | result | figure |\n|---|---|---|---|")
    for row, finding in results(rows, setting, gpus):
        print(shown(row, finding, markdown), flush=True)
        words.append(finding.word)
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("PASS", "FAIL", "skipped"))
    print(f"\n{counts}; {time.monotonic() - began:.0f} s; {common.machine()}")
    return int("FAIL" in words)


def count_gpus() -> int:
    """Count the GPUs that torch can use, in a child process, so that this process opens none."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--cpu", action="store_true", help="small shapes, on the processor")
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(MODELS), help="whose shape; not with --cpu")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="ROW", help="; ".join(names))
    parser.add_argument("--markdown", action="store_true", help="a table for docs/results/gpu.md")
    options = parser.parse_args()
    rows = [row for row in ROWS if row.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setting = Setting(folder, options.model, options.cpu)
        gpus = 0 if options.cpu else count_gpus()
        status = check(rows, setting, gpus, options.markdown)
        if status:
            kept = Path(tempfile.mkdtemp(prefix="gpu-check-")) / "log.txt"
            shutil.copy(Path(folder) / "log.txt", kept)
            print(f"all that the rows printed: {kept}")
    return status


if __name__ == "__main__":
    sys.exit(main())
