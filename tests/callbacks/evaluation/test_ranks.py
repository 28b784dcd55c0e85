"""Two real ranks under ZeRO-3: checkpoint folders, exact resume, gathered export, one evaluation of all questions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from callbacks.model_export.checkpoints import checkpoint_weights, export_checkpoint
from tests.callbacks.helpers import policy_state, same_weights
from tests.processes import run_group

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_zero3_on_two_ranks(tmp_path, model_dir):
    command = [sys.executable, str(WORKER), str(tmp_path), str(model_dir)]
    done = run_group(command, os.environ | {"OMP_NUM_THREADS": "1"}, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    weights = torch.load(tmp_path / "weights.pt")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "stage" / "model")
    assert same_weights(policy_state(exported), weights)
    assert not same_weights(policy_state(AutoModelForCausalLM.from_pretrained(model_dir)), weights)
    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())
    assert report["test"]["em"]["n"] == 4 and report["test"]["em"]["mean"] == 0.5
    frame = pl.read_parquet(tmp_path / "stage" / "evaluation" / "test.parquet")
    assert frame["id"].to_list() == ["r0q0", "r0q1", "r0q2", "r1q0"]
    merge_shards(tmp_path, model_dir, weights)
    checkpoints = sorted(p.name for p in (tmp_path / "stage" / "checkpoints").iterdir())
    whole = [f"iteration-0000000{n}.ckpt" for n in (1, 3, 4)]  # the best one, and the two newest
    assert checkpoints == ["best.ckpt", whole[0], "iteration-00000002.ckpt.bad", *whole[1:], "last.ckpt"]


def merge_shards(folder, model_dir, best):
    """The folders that two ranks wrote become one model here, in a process that never knew of ranks."""
    last = torch.load(folder / "last.pt")
    assert not same_weights(last, best)
    for name, expected in (("last", last), ("best", best)):
        checkpoint = folder / "stage" / "checkpoints" / f"{name}.ckpt"
        export_checkpoint(checkpoint, folder / name, str(model_dir))
        assert same_weights(policy_state(AutoModelForCausalLM.from_pretrained(folder / name)), expected)
    export_checkpoint(checkpoint, folder / "half", str(model_dir), dtype=torch.bfloat16)
    half = policy_state(AutoModelForCausalLM.from_pretrained(folder / "half", dtype="auto"))
    assert same_weights(half, {name: weight.to(torch.bfloat16) for name, weight in best.items()})

    shards = sorted((checkpoint / "checkpoint").glob("zero_pp_rank_1_*"))
    assert len(shards) == 2
    for shard in shards:
        content = shard.read_bytes()
        shard.unlink()
        with pytest.raises(ValueError, match="is not complete: .*(Expected 2|1 files .* 2|2 files .* 1)"):
            checkpoint_weights(checkpoint)
        shard.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="is not complete"):
            checkpoint_weights(checkpoint)
        shard.write_bytes(content)
