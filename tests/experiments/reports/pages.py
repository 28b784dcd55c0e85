"""Rows for ``write_results``, and the tables of the page that it writes."""

from __future__ import annotations

import itertools


def rows_of(stages, methods):
    return [
        {"experiment": method, "method": method.upper(), "seed": seed, "folder": stages / method / f"key{seed}",
         "seconds": 60.0, "command": f"make train EXP={method}", "commit": "abc"}
        for method in methods for seed in (0, 1) if (stages / method / f"key{seed}").exists()
    ]  # fmt: skip


def cells(line):
    return [cell.strip() for cell in line.strip(" |").split("|")]


def table_of(text, heading):
    """Rows, as {head: cell}, of the first table under a heading."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.split(heading)[1].splitlines())
    head, _, *rows = (cells(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [dict(zip(head, row, strict=True)) for row in rows]
