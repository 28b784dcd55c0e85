"""Seconds of a weight update: into the rank's own engine, and to an engine server on this host in both ways.

    python -m benchmarks.weight_push [--layers 4] [--hidden 512] [--repeats 5]

A random Qwen3 in float32, the transformers engine, 1 thread. Shared memory to the rank's own engine, files in shared
memory to a server, and HTTP buckets of 16 MiB to the same server take turns within one run; the median counts. The load
into the model, the same in all, is part of each. ``with checksums`` is the first way once more, with every tensor's
checksum taken and compared.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import page
from rollout.engines.process import ROOT
from rollout.engines.server_engine import ServerEngine
from rollout.engines.transformers_engine import TransformersEngine

MAX_LENGTH = 128
OWN = "own engine, shared memory"


def write_model(folder: Path, layers: int, hidden: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from data_modules.tokenizer import train_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 32, 2),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    train_tokenizer(["any text will do for a tokenizer"], 300).save_pretrained(folder)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    init_args = {"model": str(folder), "slots": 2, "max_length": MAX_LENGTH}
    engine = {"class_path": "rollout.engines.transformers_engine.TransformersEngine", "init_args": init_args}
    words = ["--engine", json.dumps(engine), "--port", "0", "--staging", str(folder)]
    command = [sys.executable, "-m", "rollout.engines.server", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("engine ready at "):
            raise RuntimeError(f"the engine server did not start: {line!r}; what it printed on stderr says why")
        yield line.split()[3]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def measure(folder: Path, url: str, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each push, by its way, and the model's MiB."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    own = TransformersEngine(str(folder), slots=2, max_length=MAX_LENGTH)
    remote = {
        "server, shared memory": ServerEngine([url], str(folder), MAX_LENGTH, transport="shared_memory"),
        "server, HTTP buckets": ServerEngine([url], str(folder), MAX_LENGTH, transport="http", bucket_mb=16),
    }
    ways = {OWN: (own, False), "own engine, with checksums": (own, True)}
    ways |= {name: (engine, False) for name, engine in remote.items()}
    engines = [own, *remote.values()]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        for version in range(repeats + 1):
            for name, (engine, checksum) in ways.items():
                begin = time.perf_counter()
                await engine.load_weights(model.named_parameters(), version, checksum)
                seconds[name] += [time.perf_counter() - begin] * (version > 0)  # the first push warms up
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    return seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    page.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.layers, options.hidden)
        with server(folder) as url:
            seconds, size = asyncio.run(measure(folder, url, options.repeats))
    base = median(seconds[OWN])
    figures = [
        f"{name}: {1000 * median(s):.0f} ms for {size:.1f} MiB, {size / median(s):.0f} MiB/s, "
        f"ratio {median(s) / base:.2f}"
        for name, s in seconds.items()
    ]
    print(page.rows(figures) if options.markdown else "\n".join(figures))


if __name__ == "__main__":
    main()
