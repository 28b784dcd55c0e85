"""A model, questions as CSV and a corpus of its own shape, given as paths alone, by the command of the docs."""

import json
import os
import subprocess
import sys

import polars as pl
import pytest

from experiments.registry.project import ROOT
from experiments.stages.tasks import InitialModel
from tests.rollout.chat_models import chat_model

SMALL = [  # for a random model on two cores
    "--trainer.precision=32-true",
    "--trainer.val_check_interval=2",
    "--values.max_length=1024",
    "--data.rollouts.engine.dtype=float32",
    "--data.rollouts.max_turn_tokens=16",
    "--data.rollouts.max_response_tokens=64",
    "--data.prompts_per_step=2",
    "--data.samples_per_prompt=2",
    "--data.iterations=2",
    "--model.mini_batches=1",
]


def write_own(folder):
    """40 questions and their passages, under names that are not ours."""
    people = [(f"Person {i}", f"Town {i}") for i in range(40)]
    pl.DataFrame({"prompt": [f"Where was {who} born?" for who, _ in people], "answer": [town for _, town in people]}
                 ).write_csv(folder / "q.csv")  # fmt: skip
    rows = [json.dumps({"head": who, "body": f"{who} was born in {town}."}) for who, town in people]
    (folder / "c.jsonl").write_text("\n".join(rows))
    return [
        f"--paths.questions={folder}/q.csv",
        f"--paths.corpus={folder}/c.jsonl",
        "--paths.columns.question=prompt",
        "--paths.columns.golden_answers=answer",
        "--paths.corpus_columns.title=head",
        "--paths.corpus_columns.text=body",
    ]


@pytest.mark.slow
def test_grpo_on_own_data_needs_nothing_but_paths(tmp_path):
    tokenizer = chat_model(tmp_path / "tokenizer", "qwen3")
    InitialModel(tokenizer, hidden_size=64, layers=2, head_dim=32).run(tmp_path)
    paths = [f"--paths.model={tmp_path}/model", *write_own(tmp_path)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    command = [sys.executable, "-m", "experiments", "train", "my_grpo", *paths, *SMALL]
    environment = {**own, "COMPACT_AGENTS_OUTPUTS": str(tmp_path / "out")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [index] = (tmp_path / "out" / "my_index").glob("*/index/metadata.json")
    assert json.loads(index.read_text())["passages"] == 40
    [result] = (tmp_path / "out" / "my_grpo").glob("*/result.json")
    assert (result.parent / "model" / "model.safetensors").exists()
    evaluation = (result.parent / "evaluation.json").read_text()
    assert json.loads(evaluation)
