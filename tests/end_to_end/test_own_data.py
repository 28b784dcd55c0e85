"""A model, questions, a corpus and conversations of one's own, given as paths alone, by the commands of the docs."""

import json
import os
import re
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
    "--data.max_prompt_tokens=512",
    "--data.rollouts.engine.dtype=float32",
    "--data.rollouts.max_turn_tokens=16",
    "--data.rollouts.max_response_tokens=64",
    "--data.prompts_per_iteration=2",
    "--data.group_size=2",
    "--data.iterations=2",
    "--model.num_mini_batches=1",
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


def train(folder, *words):
    """Train on the model of ``folder`` and return its stage's folder; own classes lie beside it."""
    tokenizer = chat_model(folder / "tokenizer", "qwen3")
    InitialModel(tokenizer, hidden_size=64, layers=2, head_dim=32).run(folder)
    own = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    command = [sys.executable, "-m", "experiments", "train", *words, f"--paths.model={folder}/model"]
    environment = {**own, "COMPACT_AGENTS_OUTPUTS": str(folder / "out"), "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [result] = (folder / "out" / words[0]).glob("*/result.json")
    assert (result.parent / "model" / "model.safetensors").exists()
    return result.parent


@pytest.mark.slow
def test_grpo_on_own_data_and_an_own_reward(tmp_path):
    """The reward is that of docs/own_reward.md."""
    page = (ROOT / "docs" / "own_reward.md").read_text()
    (tmp_path / "brief.py").write_text(re.search(r"```python\n(# brief.py\n.*?)```", page, re.DOTALL)[1])
    reward = ["--data.rollouts.reward", "brief.BriefReward", "--data.rollouts.reward.per_call", "0.1"]
    folder = train(tmp_path, "my_grpo", *write_own(tmp_path), *SMALL, *reward)
    [index] = (tmp_path / "out" / "my_index").glob("*/index/metadata.json")
    assert json.loads(index.read_text())["passages"] == 40
    assert "calls" in (folder / "evaluation.json").read_text(), "a part of the own reward"


@pytest.mark.slow
def test_sft_on_own_conversations_teaches_what_they_do(tmp_path):
    """All of them call Python and box what it printed: so does the model then, asked about other things."""
    asked = [f"Which colour has thing {i}?" for i in range(80)]
    pl.DataFrame({"question": asked[40:], "golden_answers": ["blue"] * 40}).write_csv(tmp_path / "q.csv")
    code = {"name": "code_interpreter", "arguments": {"code": "print('blue')"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": code}]}
    said = [call, {"role": "tool", "content": "blue"}, {"role": "assistant", "content": "\\boxed{blue}"}]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}, *said]}) for text in asked[:40]]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    folder = train(
        tmp_path, "my_sft", "--paths.tools=python", f"--paths.questions={tmp_path}/q.csv",
        "--paths.learn=conversations", f"--paths.conversations={tmp_path}/t.jsonl",
        "--values.rollouts.init_args.protocol.init_args.instruction=none", "--values.max_length=512",
        "--trainer.precision=32-true", "--data.rollouts.engine.dtype=float32", "--data.rollouts.max_turn_tokens=64",
        "--data.val_files=[]", "--trainer.val_check_interval=null", "--trainer.max_epochs=12", "--model.lr=4e-3",
    )  # fmt: skip
    test = json.loads((folder / "evaluation.json").read_text())["test"]
    assert (test["em"]["mean"], test["tool_calls"]["mean"]) == (1.0, 1.0)
