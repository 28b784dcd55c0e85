"""Nothing that an algorithm makes stays in the host's memory when its models do not: CPU alone would never show it."""

from pathlib import Path

import pytest

from tests.processes import run_ranks

WORKER = Path(__file__).with_name("pretended_worker.py")  # a process of its own: it changes torch


@pytest.mark.slow
def test_an_iteration_with_models_elsewhere(model_dir, teacher_dir):
    """Branches and groups over several epochs, and episodes' tables; the worker takes all trainings by hand."""
    run_ranks(WORKER, model_dir, teacher_dir, "aepo", "gigpo")
