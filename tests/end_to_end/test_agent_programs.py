"""The four agent programs, from demonstrations to GRPO through real engines, with a fraction of their data."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from experiments.registry.project import ROOT
from rollout.storage import load_trajectories
from rollout.trajectory import split_turns

LEAST = {  # rows of a rollout with more than one
    "openai": 1,
    "shell": 1,
    "planner": 2,
    "compacting": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("agent", LEAST)
def test_an_agent_program_trains(agent, tmp_path):
    if agent == "shell" and shutil.which("curl") is None:
        pytest.skip("no curl here")
    name = f"agent_{agent}"
    fewer = [
        f"--stages.{name}_demonstrations.task.limit=96",
        f"--stages.{name}_sft.trainer.max_epochs=1",
        f"--stages.{name}_sft.trainer.check_val_every_n_epoch=1",
        "--data.iterations=2",
        "--data.prompts_per_iteration=4",
        "--trainer.val_check_interval=2",
        "--data.max_val=8",
        "--data.max_test=8",
        f"--stages.{name}_sft.data.max_val=8",
        f"--stages.{name}_sft.data.max_test=8",
        "--values.tracker=none",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "experiments", "train", name, *fewer],
        cwd=ROOT,
        env=os.environ | {"COMPACT_AGENTS_OUTPUTS": str(tmp_path), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [folder] = [path.parent for path in (tmp_path / name).glob("*/metrics.jsonl")]
    metrics = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [m for m in metrics if "train/reward" in m]
    assert len(trained) == 2 and all(m["train/logprob_gap"] < 1e-3 for m in trained), "trainer and engine agree"
    shown = [t for file in (tmp_path / f"{name}_demonstrations").glob("*/trajectories/*.parquet")
             for t in load_trajectories(file)]  # fmt: skip
    assert shown and all(t.reward.total > 0.5 and t.answer == t.task.golden_answers[0] for t in shown)
    assert max(len(split_turns(t)) for t in shown) >= LEAST[agent]
