"""Identifies the questions of a test, so that tables can warn of rows with different test sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import yaml

from data_modules.datasets.benchmark_names import split_reference
from experiments.registry.files import read_json
from experiments.registry.keys import HASHES, PathHasher
from experiments.stages.inputs import dataset_name

SHOWN = 6  # digits of a digest
MOST = 8  # rows of a set that are listed


def tested_on(folder: Path) -> str | None:
    """Return a stage's test set as text, such as ``gsm8k (40 questions, 3f2a1c)``; None for a stage without a test.
    Equal texts mean the same questions: the digest covers question ids and test files, as they were when the stage
    ended."""
    result = folder / "result.json"
    if result.is_file() and (stored := read_json(result).get("tested_on")):
        return stored
    import polars as pl

    from callbacks.evaluation_rows import AGENT

    table, config = folder / "evaluation" / "test.parquet", folder / "config.yaml"
    if not table.is_file():
        return None
    ids = (
        pl.read_parquet(table)
        .filter(pl.col("prompt_mode") == AGENT)
        .select("data_source", "id")
        .unique()
        .sort(pl.all())
    )
    digest = hashlib.sha256(repr(ids.rows()).encode())
    data = (yaml.safe_load(config.read_text()).get("data") or {}) if config.is_file() else {}
    outputs, names = folder.absolute().parents[1], []
    for reference in (data.get("init_args") or {}).get("test_files") or []:
        benchmark, path = split_reference(reference)
        names.append(benchmark or dataset_name(Path(path).absolute(), outputs))
        digest.update((PathHasher(outputs / HASHES)(Path(path)) if Path(path).is_file() else path).encode())
    named = ", ".join(names or ids["data_source"].unique().sort())
    return f"{named} ({len(ids)} questions, {digest.hexdigest()[:SHOWN]})"


def differing(rows: Iterable[tuple[str, str | None]]) -> str:
    """Return a warning that lists the table rows of each test set, in one line; "" unless at least two rows differ.

    Args:
        rows: label, and test set as text.
    """
    sets: dict[str, dict[str, None]] = {}
    for label, tested in rows:
        if tested:
            sets.setdefault(tested, {})[label] = None
    if len(sets) < 2:
        return ""
    listed = "; ".join(f"{_named(list(labels))}: {tested}" for tested, labels in sets.items())
    return f"The rows have {len(sets)} different test sets; compare only rows of the same set. {listed}."


def _named(labels: list[str]) -> str:
    further = len(labels) - MOST
    return f"{', '.join(labels[:MOST])}{f' and {further} more' if further > 0 else ''}"
