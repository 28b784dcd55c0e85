"""Checkpoints as Hugging Face folders: the same weights, and clear words about what is none. Shards: test_ranks.py."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks.model_export.checkpoints import checkpoint_weights, export_checkpoint
from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from tests.callbacks.helpers import make_learner, policy_state, same_weights
from tests.conftest import make_model_dir


@pytest.fixture
def interrupted(trainer_for, tmp_path):
    """(folder it started from, checkpoint, module with the weights that are in it) of a run without an export."""

    def make(tie=True):
        source = make_model_dir(tmp_path / "start", tie=tie)
        module, data = make_learner(source)
        trainer_for([IterationCheckpoint()], max_epochs=1).fit(module, datamodule=data)
        return source, find_checkpoint(tmp_path / "stage"), module

    return make


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_lightning_checkpoint(interrupted, tmp_path, tie):
    source, checkpoint, module = interrupted(tie)
    export_checkpoint(checkpoint, tmp_path / "out", str(source))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_weights(policy_state(loaded), policy_state(module.policy))
    assert not same_weights(policy_state(loaded), policy_state(AutoModelForCausalLM.from_pretrained(source)))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, module.policy.eval()(input_ids=ids).logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    text = "<search> Mira Voss </search>"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_another_type(interrupted, tmp_path):
    source, checkpoint, module = interrupted()
    export_checkpoint(checkpoint, tmp_path / "half", str(source), dtype=torch.bfloat16, max_shard_size="50KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    expected = {name: weight.to(torch.bfloat16) for name, weight in policy_state(module.policy).items()}
    assert loaded.dtype == torch.bfloat16 and same_weights(policy_state(loaded), expected)
    # a Hugging Face folder is one more thing that can be written in another type
    export_checkpoint(tmp_path / "half", tmp_path / "whole", str(tmp_path / "half"), dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert whole.dtype == torch.float32
    assert same_weights(policy_state(whole), {name: weight.float() for name, weight in expected.items()})


def test_what_is_no_checkpoint_is_told(interrupted, tmp_path):
    source, checkpoint, _ = interrupted()
    other = make_model_dir(tmp_path / "other", layers=3)
    with pytest.raises(ValueError, match=r"is not of the model at .*other: 11 parameters missing, 0 unknown"):
        export_checkpoint(checkpoint, tmp_path / "out", str(other))
    wide = make_model_dir(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ValueError, match=r"of another shape, first '.*' \(\(400, 32\) in the checkpoint, \(400, 48\)"):
        export_checkpoint(checkpoint, tmp_path / "out", str(wide))
    assert not (tmp_path / "out").exists()
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(checkpoint.read_bytes()[:5000])
    text = tmp_path / "text.ckpt"
    text.write_text("no weights")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "bare.ckpt")
    torch.save({"state_dict": {"walk": torch.zeros(1)}}, tmp_path / "walk.ckpt")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "cut.ckpt": "is not a checkpoint, or is incomplete",
        "text.ckpt": "is not a checkpoint, or is incomplete",
        "bare.ckpt": "is not a Lightning checkpoint",
        "walk.ckpt": r"holds no policy: none of its 1 tensors is named policy\.<...>",
        "empty": "is not a checkpoint; expected a .ckpt file, a DeepSpeed folder",
        "nowhere": "is not a checkpoint; expected",
    }.items():
        with pytest.raises(ValueError, match=message):
            checkpoint_weights(tmp_path / name)
