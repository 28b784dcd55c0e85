"""kill -9 in the middle of a real DGPO run (world, Lucene, engine process, critic, teacher): the resumed run ends with
exactly the weights of an uninterrupted one. Nothing is replaced by a stand-in; the models are small."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from experiments.registry.overrides import Overrides
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph

pytestmark = pytest.mark.slow
FILES = {
    "world_tiny": """
experiment: {kind: task, summary: a small world, fixed_seed: true}
seed_everything: 0
task:
  class_path: data_modules.worlds.fictional_world.build.BuildWorld
  init_args: {seed: 0, entities: 120, train: 40, val: 4, test: 4, test_unseen: 2, demonstrations: 4, articles: 2}
""",
    "student": """
experiment: {kind: task, summary: a random student}
task:
  class_path: experiments.stages.tasks.InitialModel
  init_args: {tokenizer: "${stage:world_tiny}/tokenizer", hidden_size: 32, layers: 1, initializer_range: 0.2, seed: 1}
""",
    "teacher": """
experiment: {kind: task, summary: a random teacher}
task:
  class_path: experiments.stages.tasks.InitialModel
  init_args: {tokenizer: "${stage:world_tiny}/tokenizer", hidden_size: 32, layers: 1, initializer_range: 0.2, seed: 2}
""",
    "mini": """
inherits: [tiny/bases/dgpo]
experiment: {summary: a miniature of dgpo_tiny}
values: {rollouts: {init_args: {max_turns: 1, max_turn_tokens: 12, max_response_tokens: 200}}}
trainer: {val_check_interval: null, limit_val_batches: 0}
model: {init_args: {policy: "${stage:student}/model", teacher: "${stage:teacher}/model", lr: 1.0e-3, kl_coef: 0.1}}
data: {init_args: {prompts_per_step: 6, iterations: 8, val_files: [], test_files: []}}
""",
}


def run(folder: Path, outputs: Path, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "COMPACT_AGENTS_EXPERIMENTS": str(folder),
        "COMPACT_AGENTS_OUTPUTS": str(outputs),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "experiments", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    return out


def stage_folder(files: Path, outputs: Path) -> Path:
    project = Project(experiment_dirs=(files, ROOT / "experiments" / "configs"), outputs=outputs)
    return Graph(project, "mini", Overrides(), None).target().folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def kill_after_iteration(process: subprocess.Popen[str], checkpoint: Path, iterations: int) -> None:
    """Every iteration replaces the checkpoint: kill the whole session when it has been replaced often enough."""
    deadline, seen = time.monotonic() + 300, set()
    while len(seen) < iterations:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint came"
        if checkpoint.exists():
            seen.add((os.path.realpath(checkpoint), os.stat(checkpoint).st_mtime_ns))
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_run_resumes_to_the_same_weights(files, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(run(files, whole, "train", "mini"))
    straight = stage_folder(files, whole)
    shutil.copytree(whole, broken, symlinks=True)
    folder = stage_folder(files, broken)
    shutil.rmtree(folder)

    process = run(files, broken, "train", "mini")
    kill_after_iteration(process, folder / "checkpoints" / "last.ckpt", 3)
    assert not (folder / "result.json").exists()
    said = finish(run(files, broken, "train", "mini", "--resume", "last"))
    assert re.search(r"train 100% in .* iteration 8$", said, re.MULTILINE)
    assert "continuing from" in said

    expected = load_file(straight / "model" / "model.safetensors")
    resumed = load_file(folder / "model" / "model.safetensors")
    start = load_file(next((whole / "student").glob("*/model/model.safetensors")))
    assert expected.keys() == resumed.keys()
    assert all(expected[name].equal(resumed[name]) for name in expected)
    assert not all(expected[name].equal(start[name]) for name in expected)  # and there was something to learn
