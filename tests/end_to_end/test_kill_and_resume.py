"""One fault of `make chaos`, the commonest: kill -9 in the middle of a real DGPO run (search, sandbox, engine process,
critic, teacher). The resumed run ends with exactly the weights and metrics of an uninterrupted one."""

import os
import sys

import pytest

from tests.processes import run_group

pytestmark = pytest.mark.slow


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    command = [sys.executable, "-m", "tests.chaos", "--faults", "1", "--run", "chaos_dgpo", "--fault", "kill all"]
    done = run_group(command, os.environ | {"COMPACT_AGENTS_OUTPUTS": str(tmp_path)}, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill all: every process of the run in iteration" in done.stdout and ". continued (" in done.stdout
