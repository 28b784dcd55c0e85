"""bfloat16 products over float32 master weights: no update is lost, checkpoints keep the masters, and settings that
would lose updates are refused before a model loads."""

import random

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.sft import SFT
from lightning_modules.models.liger import use_liger
from lightning_modules.models.policy import load_causal_lm, named_weights
from lightning_modules.models.precision import keep_rotary_exact
from tests.lightning_modules.helpers import fit, make_group, make_trajectories
from tests.lightning_modules.ranks import precision_worker
from tests.processes import run_ranks

BF16 = {"precision": "bf16-mixed"}


def test_one_device_keeps_small_updates_and_resumes_exactly(model_dir, tmp_path):
    """Four steps of 1e-6 of a weight each are there; two, a checkpoint and two more end with the same bits."""
    start = {k: v.detach().clone() for k, v in named_weights(load_causal_lm(str(model_dir)))}
    module, types = precision_worker.make(str(model_dir)), set()

    def look(layer, inputs, output):
        types.add(output.dtype)

    module.on_train_start = lambda: module.policy.model.layers[0].mlp.up_proj.register_forward_hook(look)
    fit(module, precision_worker.BATCHES, **BF16)
    assert types == {torch.bfloat16}
    whole = {k: v.detach().clone() for k, v in module.policy_weights()}
    precision_worker.check_moved(start, whole)
    rounded = {k: v.to(torch.bfloat16).float() for k, v in whole.items()}
    assert all(torch.equal(v, start[k].to(torch.bfloat16).float()) for k, v in rounded.items() if v.dim() < 2), (
        "the test shows nothing: even bfloat16 would have kept these updates"
    )
    path = tmp_path / "half.ckpt"
    fit(precision_worker.make(str(model_dir)), precision_worker.BATCHES[:2], **BF16).save_checkpoint(path)
    second = precision_worker.make(str(model_dir))
    fit(second, precision_worker.BATCHES[2:], ckpt_path=path, **BF16, max_steps=4)
    assert all(torch.equal(v, whole[k]) for k, v in second.policy_weights())


def test_the_second_mini_batch_sees_the_first_ones_update(model_dir):
    """Autocast may cache bfloat16 copies of the weights; of those of before the update the ratio would be 1 again."""
    rows = make_group(random.Random(0), "q", [1, 0, 0, 1, 1, 0])
    trainer = fit(GRPO(str(model_dir), lr=1e-3, num_mini_batches=1, epochs=1), [rows], **BF16)
    assert float(trainer.callback_metrics["train/ratio_max"]) == pytest.approx(1.0, abs=1e-5)
    trainer = fit(GRPO(str(model_dir), lr=1e-3, num_mini_batches=1, epochs=2), [rows], **BF16)
    assert float(trainer.callback_metrics["train/ratio_max"]) > 1.01
    assert float(trainer.callback_metrics["train/grad_norm"]) > 0


@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_a_loss_scaler_changes_neither_the_norm_nor_the_clip(model_dir, limit):
    """float16's gradients are multiplied by 65,536 until the optimiser's step."""
    rows, found = make_group(random.Random(0), "q", [1, 0, 0, 1, 1, 0]), []
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    for options in ({}, scaled):
        module = GRPO(str(model_dir), lr=1e-3, num_mini_batches=1, max_grad_norm=limit)
        start = {k: v.detach().clone() for k, v in named_weights(load_causal_lm(str(model_dir)))}
        norm = float(fit(module, [rows], **options).callback_metrics["train/grad_norm"])
        found.append((norm, sum(float((v - start[k]).abs().sum()) for k, v in module.policy_weights())))
    assert found[0][0] > 0.05 and found[1] == pytest.approx(found[0], rel=0.05)


LOSSY = [("bfloat16", "32-true"), ("bfloat16", "bf16-mixed"), ("float32", "bf16-true")]


@pytest.mark.parametrize("dtype, precision", LOSSY)
def test_half_precision_without_masters_is_refused_before_a_model_loads(tmp_path, dtype, precision):
    with pytest.raises(ValueError, match="set model.dtype: float32 and trainer.precision: bf16-mixed"):
        fit(SFT(str(tmp_path / "no model"), dtype=dtype), [make_trajectories(2)], precision=precision)


def test_liger_says_what_it_needs_before_a_model_loads(model_dir, tmp_path):
    with pytest.raises(ValueError, match="liger: true runs on CUDA only, and this trainer is on cpu"):
        fit(SFT(str(tmp_path / "no model"), liger=True), [make_trajectories(2)])
    with pytest.raises(ValueError, match="package liger-kernel, which is not installed"):
        use_liger([str(model_dir)], torch.device("cuda"))


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
FACTORS = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "model_type, rope",
    [
        ("llama", {"rope_type": "default", "rope_theta": 500_000.0}),
        ("llama", {"rope_type": "llama3", **FACTORS, **LLAMA3}),
        ("qwen2", {"rope_type": "yarn", **FACTORS}),
        ("qwen3", {"rope_type": "dynamic", **FACTORS}),
        ("olmo3", None),
        ("gemma3_text", None),
    ],
)
def test_rotary_frequencies_of_every_kind_are_made_exact_again(model_type, rope):
    """As ZeRO-3 leaves them; some models have a pair for each kind of layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    parameters = kinds if rope is None else {"rope_parameters": rope}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **parameters))
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    assert len(exact) == (2 if rope else 4)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(torch.bfloat16))
    rounded = dict(model.named_buffers())
    assert not any(torch.equal(rounded[name].float(), buffer) for name, buffer in exact.items())
    keep_rotary_exact(model)
    found = dict(model.named_buffers())
    assert all(torch.equal(found[name], buffer) for name, buffer in exact.items())
    assert not exact.keys() & model.state_dict().keys(), "no checkpoint holds them"


@pytest.mark.slow
def test_zero_on_two_ranks(model_dir, tmp_path):
    """Under ZeRO-2 and ZeRO-3 in bfloat16 the masters move and survive a checkpoint, bit for bit; and PPO on packed
    rows under ZeRO-3 does what one process does on padded ones."""
    out = tmp_path / "result.pt"
    run_ranks(precision_worker.__file__, out, model_dir)
    found = torch.load(out, weights_only=False)
    start = {k: v.detach().clone() for k, v in named_weights(load_causal_lm(str(model_dir)))}
    start = {k: v.to(torch.bfloat16).float() for k, v in start.items()}  # the engine casts first
    frequencies = load_causal_lm(str(model_dir)).model.rotary_emb.inv_freq
    for stage in ("zero2", "zero3"):
        masters, resumed, kept = (found[stage][name] for name in ("masters", "resumed", "kept"))
        precision_worker.check_moved(start, masters)
        assert all(torch.equal(v, resumed[k]) for k, v in masters.items()), stage
        assert all(torch.equal(v, masters[k].to(torch.bfloat16)) for k, v in kept.items()), stage
        assert found[stage]["gradients"] == torch.float32
        assert torch.equal(found[stage]["frequencies"], frequencies), f"{stage} has rounded the rotary frequencies"
    one = precision_worker.ppo(str(model_dir), precision_worker.GROUPS, packing=False)
    worst = max(float((v - found["ppo"][k]).abs().max()) for k, v in one.items())
    moved = max(float((v - start[k[len("policy.") :]]).abs().max()) for k, v in one.items() if k[:7] == "policy.")
    assert worst < 1e-5 < 1e-3 < moved, (worst, moved)
