"""Rows for docs/results/benchmarks.md: every benchmark prints them with ``--markdown``."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HELP = "print rows for docs/results/benchmarks.md instead of the table"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help=HELP)


def rows(figures: Iterable[str]) -> str:
    """One row of the page's table per figure: command, machine, figure."""
    words = [word for word in sys.argv[1:] if word != "--markdown"]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])
    where = machine()
    return "\n".join(f"| `{command}` | {where} | {figure} |" for figure in figures)


def machine() -> str:
    """Processor, cores, load (what else was running), and the commit that was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else "unknown processor"
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, commit {commit}"
