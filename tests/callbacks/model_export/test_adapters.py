"""What a run with LoRA leaves behind: plain merged models, small checkpoints, adapters that peft reads."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from callbacks.evaluation.evaluation import Evaluation
from callbacks.model_export.adapters import read_adapter, write_adapter
from callbacks.model_export.checkpoints import checkpoint_weights, export_checkpoint
from callbacks.model_export.exporter import Export
from callbacks.training.resume import IterationCheckpoint, find_checkpoint, size_of
from lightning_modules.models.lora import LoRA
from tests.callbacks.helpers import make_learner, policy_state, same_weights
from tests.conftest import make_model_dir

RIGHT, WRONG = "grey harbor", "elsewhere"
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def run(trainer_for, tmp_path, model_dir):
    """A run whose second validation of four is best: (module, adapters after each validation)."""
    seen = []

    class Remember(Export):
        def on_validation_end(self, trainer, pl_module):
            super().on_validation_end(trainer, pl_module)
            seen.append(dict(pl_module.adapter_weights()))

    module, data = make_learner(model_dir, [[WRONG, WRONG], [RIGHT, RIGHT], [RIGHT, WRONG], [RIGHT, RIGHT]])
    module.lora = LoRA(4, 8.0)
    callbacks = [Evaluation(), Remember(choose="best"), IterationCheckpoint(keep_best=False)]
    trainer_for(callbacks, max_epochs=1, val_check_interval=1).fit(module, datamodule=data)
    return module, seen


def test_the_best_adapters_are_merged_exported_and_put_back(run, tmp_path, model_dir):
    module, seen = run
    folder = tmp_path / "stage" / "model"
    assert same_weights(dict(module.adapter_weights()), seen[1]) and not same_weights(seen[1], seen[3])
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert same_weights(policy_state(exported), dict(module.policy_weights()))
    logits, base = module.policy(input_ids=IDS).logits, AutoModelForCausalLM.from_pretrained(model_dir)
    assert torch.allclose(exported(IDS).logits, logits, atol=1e-5)
    assert not torch.allclose(base(IDS).logits, logits, atol=1e-2)
    assert same_weights(dict(read_adapter(folder / "adapter")), seen[1])
    peft_model = PeftModel.from_pretrained(base, folder / "adapter")
    assert torch.allclose(peft_model(IDS).logits, logits, atol=1e-6)
    assert sorted(p.name for p in folder.parent.iterdir() if p.name.startswith(".")) == []


def test_a_checkpoint_holds_adapters_and_is_merged_from_files(run, tmp_path, model_dir, trainer_for):
    module, seen = run
    checkpoint = find_checkpoint(tmp_path / "stage")
    assert same_weights(checkpoint_weights(checkpoint), seen[3]), "the last ones, and no base"
    export_checkpoint(checkpoint, tmp_path / "out", str(model_dir))
    for name, parameter in module.policy.named_parameters():  # the last adapters
        if name in seen[3]:
            parameter.data.copy_(seen[3][name])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_weights(policy_state(exported), dict(module.policy_weights()))
    assert same_weights(dict(read_adapter(tmp_path / "out" / "adapter")), seen[3])
    export_checkpoint(checkpoint, tmp_path / "half", str(model_dir), dtype=torch.bfloat16)
    half = policy_state(AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto"))
    assert same_weights(half, {name: w.to(torch.bfloat16) for name, w in policy_state(exported).items()})
    whole, data = make_learner(model_dir)
    stage = tmp_path / "whole"
    trainer_for([IterationCheckpoint()], max_epochs=1, default_root_dir=str(stage)).fit(whole, datamodule=data)
    assert size_of(checkpoint) < size_of(find_checkpoint(stage))
    for other in ({"layers": 1}, {"hidden_size": 48}):
        wrong = make_model_dir(tmp_path / str(other), **other)
        with pytest.raises(ValueError, match="the adapters are not of the model at .*name the experiment"):
            export_checkpoint(checkpoint, tmp_path / "none", str(wrong))
    assert not (tmp_path / "none").exists()


def test_a_base_in_the_hubs_cache_is_named_as_the_hub_names_it(tmp_path):
    weights = {
        f"model.layers.0.self_attn.q_proj.{end}": torch.ones(2, 2)
        for end in ("lora_A.default.weight", "lora_B.default.weight")
    }
    for base, expected in {
        "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2": ("Qwen/Qwen3-0.6B", "c1899de2"),
        "/models/Qwen3-0.6B": ("/models/Qwen3-0.6B", None),
        "Qwen/Qwen3-0.6B": ("Qwen/Qwen3-0.6B", None),
    }.items():
        write_adapter(tmp_path, weights, {"rank": 2, "alpha": 4}, base)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == expected
