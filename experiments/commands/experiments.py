"""``make experiments``: lists families, or with a filter experiments, one per line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from experiments.commands.command import command, option
from experiments.registry import listing
from experiments.registry.errors import ExperimentError, nearest
from experiments.registry.listing import Summary
from experiments.stages.context import RunContext

WIDTH = 80
NEWCOMERS = """\
New here? Begin with one of these; the list below has all experiments.
  make smoke                            3 minutes on a CPU: SFT, GRPO, tests
  make train EXP=dgpo_tiny              half an hour on a CPU: a paper's method
  make train EXP=quick_grpo_qwen3_0.6b  an evening on a GPU of 24 GB
  make train EXP=my_grpo ARGS="..."     your data and model: docs/own_data.md
"""


@command(
    "list",
    "list experiments",
    option("--like", help="part of a name"),
    option("--algorithm", help="such as GRPO, in any case"),
    option("--hardware", help="part of the needed hardware, such as cpu"),
    experiment=False,
    overrides=False,
)
def list_experiments(args: argparse.Namespace, context: RunContext) -> None:
    """Print the families of experiments, or with a filter the experiments that fit it. Raises ExperimentError if no
    experiment fits."""
    every, wrong = listing.summaries(context.project)
    for fault in wrong:
        print(f"left out: {fault}", file=sys.stderr)
    if args.like is None and args.algorithm is None and args.hardware is None:
        print(NEWCOMERS)
        print_table([("family", "number", "hardware", "algorithms"), *families(every)])
        print("\nOne by one:        make experiments LIKE=sod (or ALGORITHM=GRPO, HARDWARE=cpu)")
        print("Run one:           make train EXP=kd_tiny")
        print("What it would do:  make dry-run EXP=kd_tiny")
        return
    found = [entry for entry in every if fits(entry, args)]
    if not found:
        hint = ""
        if args.algorithm is not None:
            hint = nearest(args.algorithm, {entry.algorithm for entry in every})
        elif args.like is not None:
            hint = f"; no name contains '{args.like}'{nearest(args.like, {entry.name for entry in every}, show=6)}"
        raise ExperimentError(f"no experiment of {len(every)} fits the filter{hint}")
    rows = [(entry.name, entry.algorithm, entry.reproduces or entry.summary) for entry in found]
    print_table([("experiment", "algorithm", "reproduces, or summary"), *rows])
    print(f"\n{len(found)} of {len(every)} experiments. Run the first: make train EXP={found[0].name}")


def fits(entry: Summary, args: argparse.Namespace) -> bool:
    return (
        (args.like is None or args.like.lower() in entry.name.lower())
        and (args.algorithm is None or args.algorithm.lower() == entry.algorithm.lower())
        and (args.hardware is None or args.hardware.lower() in entry.hardware.lower())
    )


def families(every: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return one table row for each family of experiments, sorted by name: family, number of experiments, hardware,
    algorithms."""
    rows = []
    for family in sorted({entry.family for entry in every}):
        members = [entry for entry in every if entry.family == family]
        trained_first = sorted(members, key=lambda entry: entry.kind != "fit")
        algorithms = dict.fromkeys(entry.algorithm for entry in trained_first if entry.algorithm not in ("", "-"))
        largest = max((entry.hardware for entry in members), key=lambda hardware: ("GPU" in hardware, hardware))
        rows.append((family, str(len(members)), largest, ", ".join(algorithms) or "needed by the others"))
    return rows


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in aligned columns. On a terminal, lines are cut at ``WIDTH`` characters."""
    width = WIDTH if sys.stdout.isatty() else None
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        print(line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}...")
