"""Compares GRPO and distillation with TRL's trainers: same model, batch, micro-batches, optimiser and one thread.

``python -m benchmarks.trl_comparison [--prompts 8] [--samples 4] [--tokens 96] [--micro-rows 8] [--repeats 3] [--cases
TEXT]``

TRL has its own environment (``make trl``). Without it only our side is measured, and the output says so. Each side is a
process that imports everything once and forks for every measurement. The sides take turns, so other work on the machine
affects both. An iteration is one batch of prompts x samples and its optimiser steps; the first of each measurement is
not counted. Rates are completion tokens per processor second (with one thread, the wall time of an idle machine; the
engine's process counts as ours). The output is the median over repeats of the median iteration, with the lowest and
highest repeat.

First, both sides must compute the same loss, gradient and AdamW update for one batch and the same weights. Losses of
SDPO, GKD and GOLD in TRL are compared on random distributions. Then these cases run on random Qwen3 models in float32:

* GRPO, whole iteration: rollouts with early ends, rewards, optimiser step (and here a weight push to the engine);
* the training part alone (scoring, forward, backward, optimiser) on given completions, with geometric lengths, as after
  early ends, or equal lengths, and with one or two optimiser steps per batch;
* distillation from a larger teacher over the whole vocabulary on given completions, reverse KL;
* TRL with the output matrix applied to completion tokens only ("compact"), as it does on CUDA; elsewhere TRL includes
  prompts and padding;
* both with a vocabulary of 32,768 and half the prompts and samples. Peak memory comes from separate runs. It is the
  increase over the process's memory before the models load; in these runs freed blocks are returned at once.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import dataclasses
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import common
from benchmarks.against_trl.cases import Case

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
NO_TRL = "no TRL here (make trl): nothing is compared, parity is not checked"
PARITY = {
    "GRPO, token mean, centred": {"kind": "grpo", "advantage": "centred"},
    "GRPO, sequence mean, std": {"kind": "grpo", "aggregation": "sequence_mean"},
    "GRPO, second pass (clipped)": {"kind": "grpo", "passes": 2, "lr": 3e-3},
    "distillation, forward KL": {"kind": "distillation", "beta": 0.0},
    "distillation, JSD 0.5": {"kind": "distillation", "beta": 0.5},
    "distillation, reverse KL": {"kind": "distillation", "beta": 1.0},
}
TIMED = {
    "GRPO, whole iteration": {"kind": "grpo", "model": "small", "lengths": None},
    "GRPO, training part, geometric lengths, 1 step": {"kind": "grpo", "model": "small", "lengths": "geometric"},
    "GRPO, training part, geometric lengths, 2 steps": {
        "kind": "grpo", "model": "small", "lengths": "geometric", "num_mini_batches": 2,
    },
    "GRPO, training part, equal lengths, 1 step": {"kind": "grpo", "model": "small", "lengths": "equal"},
    "distillation, geometric lengths": {"kind": "distillation", "model": "small", "lengths": "geometric"},
    "GRPO, training part, V = 32,768": {"kind": "grpo", "model": "wide", "lengths": "geometric"},
    "distillation, V = 32,768": {"kind": "distillation", "model": "wide", "lengths": "geometric"},
}  # fmt: skip
WITH_MEMORY = [name for name in TIMED if "whole" not in name and "2 steps" not in name]


class Side:
    """One side's process, which answers requests."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.versions: dict[str, str] = connection.recv()

    def ask(self, function: str, *arguments: Any) -> dict[str, Any]:
        self.connection.send((function, *arguments))
        found = self.connection.recv()
        if "error" in found:
            raise SystemExit(f"{self.name} failed at {function} {arguments}:\n{found['error']}")
        return found


@contextmanager
def side(name: str, python: str | Path) -> Iterator[Side]:
    """Start ``benchmarks.against_trl.NAME`` with its environment's interpreter; its prints go to stderr."""
    here, there = multiprocessing.Pipe()
    command = [str(python), "-m", f"benchmarks.against_trl.{name}", str(there.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, pass_fds=[there.fileno()])
    there.close()
    try:
        try:
            started = Side(name, here)
        except EOFError:
            raise SystemExit(f"{' '.join(command)} ended with {process.wait()} before it answered") from None
        yield started
    finally:
        here.close()
        process.wait()


# ---------------------------------------------------------------------------------------------------------- parity
def parity(ours: Side, theirs: Side, folder: Path, micro_rows: int) -> Iterator[str]:
    for name, options in PARITY.items():
        fixed = {"model": "small", "lengths": "geometric", "iterations": 1, "max_grad_norm": 0.0}
        found = {}
        for one in (ours, theirs):
            file = folder / f"{one.name}.safetensors"
            case = Case(**fixed, micro_rows=micro_rows, gradient=str(file), **options)
            found[one.name] = one.ask("measure", case, folder), load_file(file)
        (mine, a), (other, b) = found["ours"], found["theirs"]
        start = load_file(folder / "small" / "model.safetensors")
        gradient = difference(a, b, "gradient.")
        update = difference(*({k: v - start[k[7:]] for k, v in x.items() if k[:7] == "weight."} for x in (a, b)))
        text = f"gradients differ by {gradient:.0e} relative, weight updates by {update:.0e}"
        if options.get("passes", 1) == 1:
            text = f"loss {mine['loss']:.6f}, TRL {other['loss']:.6f}; {text}"
        else:  # the two sides log the loss of two passes differently
            text = f"the clip holds {mine['clipped']:.0%} of both passes' tokens; {text}"
        yield f"parity, {name}: {text}"
    for name, (values, gradients) in theirs.ask("divergences").items():
        yield f"parity, loss of {name}: values differ by at most {values:.0e}, gradients by {gradients:.0e}"


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], prefix: str = "") -> float:
    """Return the relative difference ||a - b|| / ||b|| over all tensors with this name prefix."""
    names = {name for name in a if name.startswith(prefix)}
    if not names or names != {name for name in b if name.startswith(prefix)}:
        raise SystemExit(f"the sides have other {prefix or 'tensors'}: {sorted(names ^ b.keys())[:4]}")
    x, y = (torch.cat([d[name].double().flatten() for name in sorted(names)]) for d in (a, b))
    return float((x - y).norm() / y.norm())


# ----------------------------------------------------------------------------------------------------------- speed
@dataclasses.dataclass
class Measured:
    """Metrics of one runner and one case: one value per repeat, from the median iteration of the repeat."""

    rates: list[float] = dataclasses.field(default_factory=list)  # completion tokens per processor second
    seconds: list[float] = dataclasses.field(default_factory=list)  # wall seconds of an iteration
    cpu: list[float] = dataclasses.field(default_factory=list)  # processor seconds of an iteration
    training: list[float] = dataclasses.field(default_factory=list)  # processor seconds of its training part
    mebibytes: float | None = None

    def add(self, rows: list[dict[str, float]], part: str) -> None:
        self.rates.append(statistics.median(row["tokens"] / row[part] for row in rows))
        for key in ("seconds", "cpu", "training"):
            getattr(self, key).append(statistics.median(row[key] for row in rows))

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def runners(name: str, sides: dict[str, Side]) -> dict[str, tuple[Side, dict[str, Any]]]:
    """Return the participants of a case by label: the side and its settings."""
    found: dict[str, tuple[Side, dict[str, Any]]] = {"ours": (sides["ours"], {})}
    if "theirs" in sides:
        found["TRL"] = sides["theirs"], {}
        if TIMED[name]["lengths"] is not None:
            found["TRL compact"] = sides["theirs"], {"compact": True}
    return found


def speed(sides: dict[str, Side], folders: dict[str, Path], options: argparse.Namespace) -> Iterator[str]:
    measured: dict[tuple[str, str], Measured] = {}
    timed = {name: settings for name, settings in TIMED.items() if options.cases in name}
    for repeat in range(options.repeats + 1):  # the last repeat is for memory
        for name, settings in timed.items():
            memory = repeat == options.repeats
            if memory and name not in WITH_MEMORY:
                continue
            for label, (one, own) in runners(name, sides).items():
                sizes = {"iterations": options.iterations, "micro_rows": options.micro_rows}
                case = Case(**settings, **sizes, **own, return_memory=memory)
                found = one.ask("measure", case, folders[case.model])
                taken = f"{found['mebibytes']:.0f} MiB" if memory else f"{found['rows'][-1]['cpu']:.2f} CPU s"
                print(f"{repeat + 1}/{options.repeats + 1} {name}, {label}: {taken}", file=sys.stderr, flush=True)
                entry = measured.setdefault((name, label), Measured())
                if memory:
                    entry.mebibytes = found["mebibytes"]
                else:
                    entry.add(found["rows"], "cpu" if case.lengths is None else "training")
    for name in timed:
        entries = {label: measured[name, label] for label in runners(name, sides)}
        yield f"{name}: {metric(entries, TIMED[name]['lengths'] is None)}"


def metric(entries: dict[str, Measured], whole: bool) -> str:
    parts = []
    for label, m in entries.items():
        text = f"{label} {m.rate:.0f} tokens per CPU s ({min(m.rates):.0f} to {max(m.rates):.0f})"
        if whole:
            cpu, training, seconds = (statistics.median(values) for values in (m.cpu, m.training, m.seconds))
            text += f", {cpu:.2f} CPU s of which training {training:.2f}, {seconds:.2f} s of wall time"
        elif m.mebibytes is not None:
            text += f", peak +{m.mebibytes:.0f} MiB"
        parts.append(text)
    ours = entries["ours"]
    for label, theirs in entries.items():
        if label != "ours":
            ratio = f"ours / {label} {ours.rate / theirs.rate:.2f} in speed"
            if ours.mebibytes and theirs.mebibytes:
                ratio += f", {ours.mebibytes / theirs.mebibytes:.2f} in peak memory"
            parts.append(ratio)
    return "; ".join(parts)


# ------------------------------------------------------------------------------------------------------------ main
def make_folders(root: Path, ours: Side, options: argparse.Namespace) -> dict[str, Path]:
    """Write the inputs of both sides into a folder per model, and return the folders by model. The wide model has half
    the prompts and half the samples per prompt."""
    for name, share in (("small", 1), ("wide", 2)):
        (root / name).mkdir()
        ours.ask("prepare", root / name, name, options.prompts // share, options.samples // share, options.tokens)
    return {name: root / name for name in ("small", "wide")}


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=96, help="the longest completion")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows that go through the model at once")
    parser.add_argument("--iterations", type=int, default=3, help="per measurement, the first not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", default="", help="measure only those whose name contains this")
    parser.add_argument("--trl", type=Path, default=TRL_PYTHON, help="interpreter of the environment that has TRL")
    parser.add_argument("--parity", action="store_true", help="only show that both sides compute the same")
    options = parser.parse_args()
    if options.prompts % 2 or options.samples % 4 or (options.prompts * options.samples) % (4 * options.micro_rows):
        parser.error("expected even prompts, samples in fours, and prompts x samples a multiple of 4 x micro-rows")
    common.print_metrics(options, metrics(options))


def metrics(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        sides = {"ours": stack.enter_context(side("ours", sys.executable))}
        folders = make_folders(Path(name), sides["ours"], options)
        if options.trl.exists():
            sides["theirs"] = stack.enter_context(side("theirs", options.trl))
            versions = ", ".join(f"{k} {v}" for k, v in (sides["ours"].versions | sides["theirs"].versions).items())
            yield f"versions: {versions}"
            yield from parity(sides["ours"], sides["theirs"], folders["small"], options.micro_rows)
        else:
            yield NO_TRL
        if not options.parity:
            yield from speed(sides, folders, options)


if __name__ == "__main__":
    main()
