"""Helpers of the benchmarks: printing, random models, measurements in child processes."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print rows for docs/results/benchmarks.md")
    return parser


def print_metrics(options: argparse.Namespace, metrics: Iterable[str]) -> None:
    """Print each metric as it arrives: a line, or with ``--markdown`` a row of the page's table (command, machine,
    metric)."""
    words = [word for word in sys.argv[1:] if word != "--markdown"]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])
    for metric in metrics:
        print(f"| `{command}` | {machine()} | {metric} |" if options.markdown else metric, flush=True)


def machine() -> str:
    """Return processor, cores, load (other work on the machine) and the measured commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else "unknown processor"
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, commit {commit}"


def save_tokenizer(folder: str | Path) -> Any:
    """Save a small tokenizer."""
    from experiments.worlds.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer([Path(__file__).read_text()], vocab_size=1000)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_random_model(folder: Path, dtype: str = "float32", **config: Any) -> None:
    """Save a model of this config.json with random weights, and a small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    full = AutoConfig.for_model(**config, eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(full, dtype=getattr(torch, dtype)).save_pretrained(folder)
