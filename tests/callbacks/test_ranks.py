"""Two real ranks under ZeRO-3: checkpoint folders, exact resume, gathered export, one evaluation of all questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import torch
from transformers import AutoModelForCausalLM

from tests.callbacks.helpers import policy_state, same_weights

WORKER = Path(__file__).with_name("ranks_worker.py")


def test_zero3_on_two_ranks(tmp_path, model_dir):
    command = [sys.executable, str(WORKER), str(tmp_path), str(model_dir)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    weights = torch.load(tmp_path / "weights.pt")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "stage" / "model")
    assert same_weights(policy_state(exported), weights)
    assert not same_weights(policy_state(AutoModelForCausalLM.from_pretrained(model_dir)), weights)
    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())
    assert report["test"]["em"]["n"] == 4 and report["test"]["em"]["mean"] == 0.5
    frame = pl.read_parquet(tmp_path / "stage" / "evaluation" / "test.parquet")
    assert frame["id"].to_list() == ["r0q0", "r0q1", "r0q2", "r1q0"]
    checkpoints = sorted(p.name for p in (tmp_path / "stage" / "checkpoints").iterdir())
    assert checkpoints == ["best.ckpt", "iteration-00000001.ckpt", "iteration-00000004.ckpt", "last.ckpt"]
