"""The whole chain once, shortened: Lucene, the engine, SFT, GRPO, tests and MLflow, by the command that users type."""

import os
import sqlite3
import subprocess
import sys

import pytest

from experiments.registry.project import ROOT

SHORT = [
    "--stages.smoke_world.task.articles=16",
    "--stages.smoke_world.task.demonstrations=48",
    "--stages.smoke_world.task.test=8",
    "--stages.smoke_sft.trainer.max_epochs=1",
    "--data.iterations=2",
    "--trainer.val_check_interval=2",
]


@pytest.mark.slow
def test_the_smoke_experiment_ends_with_a_table(tmp_path):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}  # of tests before this
    environment = {**own, "COMPACT_AGENTS_OUTPUTS": str(tmp_path)}
    command = [sys.executable, "-m", "experiments", "train", "smoke", "--compare", *SHORT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in table] == ["SFT", "GRPO"]
    [result] = (tmp_path / "smoke").glob("*/result.json")
    for made in ("evaluation.json", "model/model.safetensors", "trajectories"):
        assert (result.parent / made).exists(), made
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        steps = store.execute("select max(step) from metrics where key = 'train/reward'").fetchone()
    assert steps[0] == 1, "two iterations, counted from 0"
