"""Commit and command of a run, the tracking URI, and durations as text. Imports without torch."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

from common.make_command import COMMAND_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SQLITE = "sqlite:///"
RUN_ID_FILE = "mlflow_run_id"  # in the folder of a run
TRAINING_FILE = "training.json"  # time and cost of a training run, from callbacks.training.training_totals


class RunStopped(Exception):
    """A user or a scheduler stopped the run; it has not failed."""


def commit() -> str:
    """Return the hash of the project's Git HEAD, with ``+changes`` if tracked files differ. Outside a repository:
    ``unknown``."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def run_info() -> dict[str, str]:
    """Return the Git commit and the command line of this process, to be stored with results."""
    command = os.environ.get(COMMAND_VARIABLE) or shlex.join([Path(sys.executable).name, *sys.argv])
    return {"commit": commit(), "command": command}


def default_tracking_uri(outputs: Path | None = None) -> str:
    """Return the MLflow tracking URI: ``MLFLOW_TRACKING_URI`` if set, else an SQLite file in the outputs folder. This
    folder is ``COMPACT_AGENTS_OUTPUTS``, by default ``outputs`` in the project's root."""
    outputs = outputs or Path(os.environ.get("COMPACT_AGENTS_OUTPUTS", ROOT / "outputs")).absolute()
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{outputs / 'mlflow.db'}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``"3.2 s"``, ``"4 min 10 s"`` or ``"2 h 05 min"``; ``"?"`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
