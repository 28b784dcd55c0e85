"""What the page says of gates."""

from __future__ import annotations

import pytest

from callbacks.tracking.metrics_file import METRICS_FILE, MetricsFile
from experiments.reports.results import Run
from experiments.reports.signal_tables import ACTIVE, GAP, gates_section


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Two seeds whose share rises by .01 an iteration, one .1 higher; a run without gates, and one at beta 0."""
    folder = tmp_path_factory.mktemp("gates")
    runs = []
    for name, seed, base in (("SDAR", 0, 0.3), ("SDAR", 1, 0.4), ("GRPO", 0, None), ("beta 0", 0, 0.0)):
        stage = folder / name / str(seed)
        stage.mkdir(parents=True)
        file = MetricsFile(stage / METRICS_FILE)
        for step in range(20):
            figures = {"train/reward": 1.0}
            if base is not None:
                share = base + 0.01 * step if base else 0.0
                figures |= {ACTIVE: share, GAP: -share, f"{ACTIVE}/part1": share, f"{ACTIVE}/turn1": share + 0.1}
                figures[f"{GAP}/turn1"] = -2 * share
            file.append(figures, step)
        runs.append(Run(name.lower(), name, seed, stage, 1.0, "make", "c0"))
    return runs


def test_section(logged):
    """Seeds are averaged: 0.395 is 0.35 + 0.045, the mean of the first ten iterations; 0.495 that of the last ten."""
    text = gates_section(logged)
    assert "| SDAR | -0.395 | -0.495 | 0.395 | 0.495 |" in text
    assert "| SDAR | 0.495 | - | - | 0.595 | - |" in text and "GRPO" not in text
    assert "| SDAR | - | - | - | -0.990 | - |" in text, "the gap by turn"
    assert "0.000 | - | - |" in text, "gates that are all one half endorse nothing and refuse nothing"
    assert text.count("| beta 0 |") == 2, "the gap it has"
    assert gates_section(logged[2:3]) == ""
    assert "| beta 0 |" in gates_section(logged[2:])
