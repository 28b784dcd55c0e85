"""The seed of a run."""

from __future__ import annotations

import os


def run_seed(seed: int | None) -> int:
    """``seed``, or the run's ``seed_everything`` (Lightning keeps it in PL_GLOBAL_SEED), or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
