"""Peak memory of each technique against its naive form.

``python -m benchmarks.memory [--layers 6] [--hidden 256] [--rows 16] [--techniques logits packing ...]``

Every form runs in a process of its own, which reports by how much its peak resident memory exceeds what it held before
(model and tokens made); ``benchmarks.sharding`` has what ranks hold of a model's states. What is compared:

* ``logits``: log-probs, entropy and cross-entropy of all tokens, forward and backward, at a vocabulary of 32,000: all
  logits at once against 128 tokens at a time (``benchmarks.chunked_logprobs`` has KL and the vocabulary of Qwen);
* ``checkpointing``: activations kept against recomputed;
* ``packing``: one micro-batch of rows of 100 to 1,000 tokens, padded against packed;
* ``micro-batches``: a packed batch at once against micro-batches of 2,048 tokens;
* ``precision``: a training step (forward, backward, AdamW) in float32 against bfloat16 products over float32 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import page
from benchmarks.packing import make_batch, make_model, search_lengths, train

ROOT = Path(__file__).resolve().parents[1]
FORMS = {
    "logits": ("whole", "chunked"),
    "checkpointing": ("kept", "recomputed"),
    "packing": ("padded", "packed"),
    "micro-batches": ("whole batch", "micro-batches"),
    "precision": ("float32", "bf16-mixed"),
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prepare(technique: str, form: str, layers: int, hidden: int, rows: int) -> Callable[[], None]:
    """Make model and tokens, and return what is to be measured."""
    import torch

    torch.set_num_threads(1)
    lengths = search_lengths(rows, random.Random(0))
    everything = [list(range(rows))]
    if technique == "logits":
        return _logits(form, sum(lengths), hidden)
    padded = technique == "packing" and form == "padded"
    model = make_model("sdpa" if padded else "packed", layers, hidden, checkpointing=form == "recomputed")
    batch = make_batch(lengths)
    if form == "micro-batches":
        from lightning_modules.batch import micro_batches

        everything = micro_batches(lengths, range(rows), 2048, packed=True)
    if technique != "precision":
        return lambda: train(model, batch, everything)
    return lambda: _step(model, batch, everything, torch.autocast("cpu", torch.bfloat16, form != "float32", False))


def _logits(form: str, tokens: int, hidden: int, vocabulary: int = 32_000) -> Callable[[], None]:
    import torch

    from lightning_modules.projection import LMHead, token_statistics

    torch.manual_seed(0)
    head = LMHead(hidden, vocabulary, bias=False)
    states, targets = torch.randn(tokens, hidden, requires_grad=True), torch.randint(vocabulary, (tokens,))

    def columns(logits, targets):
        statistics = token_statistics(logits, targets)
        return torch.cat([statistics, -statistics[:, :1]], -1)

    chunk = tokens if form == "whole" else 128
    return lambda: head(states, function=columns, rows=(targets,), chunk=chunk).mean().backward()


def _step(model, batch, groups, context) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters())
    with context:
        train(model, batch, groups)
    optimizer.step()


def measure(technique: str, form: str, layers: int, hidden: int, rows: int) -> int:
    """Bytes, in this process."""
    work = prepare(technique, form, layers, hidden, rows)
    before = held_bytes()
    work()
    return peak_bytes() - before


def child(technique: str, form: str, sizes: dict[str, int], folder: Path) -> int:
    """Bytes, measured in a process of its own."""
    out = folder / f"{technique} {form}.json"
    command = [sys.executable, "-m", "benchmarks.memory", "--child", technique, form, str(out), json.dumps(sizes)]
    # Freed blocks go back to the system at once, so that the peak counts live tensors, not a fragmented heap.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
    environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines advertise AMX and cannot run it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{technique} {form} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(out.read_text())


def run_child(technique: str, form: str, out: str, sizes: str) -> None:
    Path(out).write_text(json.dumps(measure(technique, form, **json.loads(sizes))))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return run_child(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="trajectories of 100 to 1,000 tokens")
    parser.add_argument("--techniques", nargs="+", choices=FORMS, default=list(FORMS), help="which to measure")
    page.add_option(parser)
    sizes = vars(parser.parse_args())
    markdown, techniques = sizes.pop("markdown"), sizes.pop("techniques")
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for technique in techniques:
            forms = FORMS[technique]
            found = {form: child(technique, form, sizes, Path(folder)) for form in forms}
            naive = found[forms[0]]
            for form, peak in found.items():
                ratio = f"naive / this {naive / peak:.2f}" if form != forms[0] else "the naive form"
                figures.append(f"{technique}, {form}: peak +{peak / 2**20:.0f} MiB, {ratio}")
    print(page.rows(figures) if markdown else "\n".join(figures))


if __name__ == "__main__":
    main()
