"""LoRA on two ranks does what it does on one; its sharded checkpoints resume, and are merged from files."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from callbacks.model_export.adapters import read_adapter
from callbacks.model_export.checkpoints import checkpoint_weights, export_checkpoint
from tests.callbacks.helpers import policy_state, same_weights
from tests.callbacks.model_export import lora_worker
from tests.conftest import make_model_dir
from tests.processes import run_ranks

pytestmark = pytest.mark.slow  # two processes, each importing deepspeed


def launch(folder, model):
    run_ranks(lora_worker.__file__, folder, model)
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    model_dir = make_model_dir(tmp_path / "model", layers=1)
    two = launch(tmp_path, model_dir)
    merged, low_rank, figures, module = lora_worker.train(str(model_dir), lambda rows: rows)
    for name in ("zero3", "zero2", "ddp"):
        weights, factors, told = two[name]
        assert list(weights) == list(merged) and factors.keys() == low_rank.keys()
        worst = max(float((factors[k] - low_rank[k]).abs().max()) for k in low_rank)
        assert worst < 1e-5, (name, worst)
        assert max(float((weights[k] - merged[k]).abs().max()) for k in merged) < 1e-5, name
        assert {k: told[k] for k in told if k.startswith("train/loss")} == pytest.approx(
            {k: v for k, v in figures.items() if k.startswith("train/loss")}, rel=1e-4, abs=1e-5
        )
    assert two["gap"] < 2e-5, "what is pushed does not say what is trained"
    for straight, resumed in zip(two["zero3"], two["resumed"], strict=False):
        assert same_weights(resumed, straight)
    alone = lora_worker.train(str(model_dir), lambda rows: rows, str(tmp_path / "first.ckpt"))[0]
    assert max(float((alone[k] - merged[k]).abs().max()) for k in merged) < 1e-5, "two ranks, then one process"
    first = checkpoint_weights(tmp_path / "first.ckpt")
    moved = {k: float((low_rank[k] - v).abs().max()) for k, v in first.items()}
    assert max(moved.values()) > 1e-3, "nothing was learnt, so equality proves nothing"
    frozen = [k for k in merged if "proj" not in k]
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert frozen and all(torch.equal(merged[k], dict(base.named_parameters())[k]) for k in frozen)

    checkpoint = tmp_path / "stage" / "checkpoints" / "last.ckpt"
    adapters = {k: v for k, v in two["resumed"][1].items() if not k.startswith("critic.")}
    assert same_weights(checkpoint_weights(checkpoint), adapters), "adapters, and no base"
    export_checkpoint(checkpoint, tmp_path / "out", str(model_dir))
    assert same_weights(policy_state(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), two["resumed"][0])
    assert same_weights(dict(read_adapter(tmp_path / "out" / "adapter")), adapters)
