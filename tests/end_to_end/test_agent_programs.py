"""The five agent programs, from demonstrations to GRPO through real engines, and KD and SDAR on one of them, with a
fraction of their data."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.registry.project import ROOT
from rollout.storage import load_trajectories
from rollout.trajectory import split_turns

LEAST = {  # rows of a rollout with more than one
    "openai": 1,
    "langgraph": 1,
    "shell": 1,
    "planner": 2,
    "compacting": 2,
}
# Options of a stage that fits, and of one that is on policy besides.
SHORT = ["data.max_val=8", "data.max_test=8"]
FEW = ["data.iterations=2", "data.prompts_per_iteration=4", "trainer.val_check_interval=2"]
ALGORITHMS = {
    "kd": """
inherits: [bases/supervised, agents/bases/openai, agents/bases/fit]
experiment: {summary: KD on a program, label: KD, algorithm: KD, models: agent_model}
trainer: {max_epochs: 1, check_val_every_n_epoch: 1}
model:
  class_path: lightning_modules.algorithms.cold_start_kd.ColdStartKD
  init_args: {policy: "${stage:agent_model}/model", teacher: "${stage:agent_openai_sft}/model", lr: 3.0e-3}
data: {init_args: {trajectories: ["${stage:agent_openai_demonstrations}/trajectories"], batch_tokens: 2048}}
""",
    "sdar": """
inherits: [bases/on_policy, agents/bases/openai, agents/bases/fit]
experiment: {summary: SDAR on a program, label: SDAR, algorithm: SDAR, models: agent_openai_sft}
model:
  class_path: lightning_modules.algorithms.sdar.SDAR
  init_args:
    policy: ${stage:agent_openai_sft}/model
    lr: 3.0e-4
    num_mini_batches: 1
    max_tokens_per_micro_batch: 8192
    skills_coef: 0.01
    skills:
      {bank: search, retriever: {class_path: rollout.skills.retrieval.Full}, max_tokens: 4096, place: before_template}
data: {init_args: {train_files: ["${stage:agent_world}/train.parquet"], group_size: 8}}
""",
}


def train(name: str, agent: str, outputs: Path, options: list[str], variables: dict[str, str] | None = None):
    """Train an experiment whose earlier stages are those of an agent, and return the metrics of its iterations."""
    sft = f"stages.agent_{agent}_sft"
    before = [f"stages.agent_{agent}_demonstrations.task.limit=96", f"{sft}.trainer.max_epochs=1"]
    before += [f"{sft}.trainer.check_val_every_n_epoch=1", *(f"{sft}.{option}" for option in SHORT)]
    ran = subprocess.run(
        [sys.executable, "-m", "experiments", "train", name]
        + [f"--{option}" for option in (*before, *SHORT, *options, "values.tracker=none")],
        cwd=ROOT,
        env=os.environ | {"COMPACT_AGENTS_OUTPUTS": str(outputs), "COLUMNS": "120"} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [file] = (outputs / name).glob("*/metrics.jsonl")
    return [json.loads(line)["metrics"] for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """One for all tests: their world, their model, and one agent's demonstrations and SFT are the same stages."""
    return tmp_path_factory.mktemp("outputs")


@pytest.mark.slow
@pytest.mark.parametrize("agent", LEAST)
def test_an_agent_program_trains(agent, outputs):
    if agent == "shell" and shutil.which("curl") is None:
        pytest.skip("no curl here")
    name = f"agent_{agent}"
    trained = [m for m in train(name, agent, outputs, FEW) if "train/reward" in m]
    assert len(trained) == 2 and all(m["train/logprob_gap"] < 1e-3 for m in trained), "trainer and engine agree"
    shown = [t for file in (outputs / f"{name}_demonstrations").glob("*/trajectories/*.parquet")
             for t in load_trajectories(file)]  # fmt: skip
    assert shown and all(t.reward.total > 0.5 and t.answer == t.task.golden_answers[0] for t in shown)
    assert max(len(split_turns(t)) for t in shown) >= LEAST[agent]


@pytest.mark.slow
def test_kd_and_sdar_train_on_a_program(outputs, tmp_path):
    for name, text in ALGORITHMS.items():
        (tmp_path / f"agent_{name}.yaml").write_text(text)
    own = {"COMPACT_AGENTS_EXPERIMENTS": str(tmp_path)}
    kd = [m for m in train("agent_kd", "openai", outputs, [], own) if "train/loss" in m]
    assert kd[-1]["train/loss"] < kd[0]["train/loss"]
    sdar = [m for m in train("agent_sdar", "openai", outputs, FEW, own) if "train/reward" in m]
    assert len(sdar) == 2 and all(m["train/logprob_gap"] < 1e-3 and m["train/skills_tokens"] > 0 for m in sdar)
    assert all(0 < m["train/gate"] < 1 and m["train/gap"] != 0 for m in sdar)
