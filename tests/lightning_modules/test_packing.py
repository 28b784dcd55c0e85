"""Packed rows against padded ones: the same log-probs, values, gradients and training steps, and no token that sees
another sequence's."""

import dataclasses
import random

import pytest
import torch

from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.batch import collate, micro_batches
from lightning_modules.models import packing
from lightning_modules.models.policy import ValueModel, is_packed, load_causal_lm, named_weights, token_logprobs
from tests.lightning_modules.helpers import VOCABULARY, fit, make_group, make_trajectories

# sums in another order: about 1e-7 of the terms each; over two layers with weights of 0.2 some tens of times that
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2", "qwen2 with a window"])
def folder(request, model_dir, tmp_path_factory):
    """Model folders: heads shared in groups, biases, head norms and, in one layer of two, a window of 4 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if request.param == "qwen3":
        return str(model_dir)
    kind = request.param.partition(" ")[0]
    window = WINDOW if "window" in request.param else {}
    config = LlamaConfig(**SHAPE) if kind == "llama" else Qwen2Config(**SHAPE, **window)
    path = tmp_path_factory.mktemp(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        (LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM)(config).save_pretrained(path)
    return str(path)


def perturbed(batch, row):
    ids = batch.input_ids.clone()
    ids[row] = (ids[row] + 1) % VOCABULARY
    return dataclasses.replace(batch, input_ids=ids)


def said(model, critic, batch):
    stats = token_logprobs(model, batch, chunk=7)
    real = batch.response_mask
    weights = torch.linspace(-1, 1, stats.logprobs.numel()).view_as(stats.logprobs)
    values = critic(batch) * real
    ((stats.logprobs + stats.entropy + values) * weights).sum().backward()
    gradients = {f"{i}.{k}": p.grad for i, m in enumerate((model, critic)) for k, p in m.named_parameters()}
    return {"logprobs": stats.logprobs, "entropy": stats.entropy, "values": values} | gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_says_what_padded_says_with_the_same_gradients(folder, checkpointing):
    batch = collate(make_trajectories(6, seed=2))
    assert batch.lengths.min() < batch.lengths.max()
    found = []
    for attention in ("packed", "sdpa"):
        model = load_causal_lm(folder, attention=attention, gradient_checkpointing=checkpointing)
        critic = ValueModel(folder, attention=attention, gradient_checkpointing=checkpointing)
        torch.nn.init.constant_(critic.head.weight, 0.1)
        found.append(said(model, critic, batch))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], **CLOSE), name
        assert value.abs().max() > 1e-3, name


def test_no_token_sees_another_sequence(folder):
    batch = collate(make_trajectories(5, seed=4))
    model = load_causal_lm(folder, attention="packed")
    with torch.no_grad():
        states, rows, _ = packing.packed_states(model.base_model, batch)
        for row in (0, 2, 4):
            after = packing.packed_states(model.base_model, perturbed(batch, row))[0]
            changed = (states != after).any(-1)
            assert not changed[rows != row].any(), "bit for bit"
            assert changed[rows == row].all()


def test_an_empty_micro_batch_reaches_every_parameter(folder):
    model, critic = load_causal_lm(folder, attention="packed"), ValueModel(folder, attention="packed")
    stand_in = collate(make_trajectories(2)).rows([], 1)
    stats, values = token_logprobs(model, stand_in), critic(stand_in)
    assert stats.logprobs.shape == values.shape == (1, 1)
    (stats.logprobs.sum() + stats.entropy.sum() + values.sum()).backward()
    for part in (model, critic):
        assert all(p.grad is not None and not p.grad.any() for p in part.parameters())


def trained(module, rows):
    trainer = fit(module, [rows])
    weights = {k: v.clone() for k, v in named_weights(module) if not k.startswith(("teacher.", "reference."))}
    return weights, {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "kd"])
def test_a_training_step_packed_is_a_training_step_padded(algorithm, model_dir, teacher_dir):
    """With a reference or a teacher, two mini-batches and several micro-batches, of other rows in the two forms."""
    rng = random.Random(3)
    rows = make_group(rng, "q1", [1, 0, 0, 1]) + make_group(rng, "q2", [0.5, 0, 1])
    model, teacher = str(model_dir), str(teacher_dir)
    common = {"lr": 1e-3, "max_tokens_per_micro_batch": 60, "logits_chunk": 4}
    make = {
        "grpo": lambda **o: GRPO(model, reference=teacher, kl_coef=0.1, **common, **o),
        "ppo": lambda **o: PPO(model, reference=teacher, kl_coef=0.1, critic_lr=1e-3, **common, **o),
        "kd": lambda **o: ColdStartKD(model, teacher, schedule="constant", **common, **o),
    }[algorithm]
    modules = [make(packing=packed) for packed in (True, False)]
    (packed, figures), (padded, expected) = (trained(module, rows) for module in modules)
    assert is_packed(modules[0].policy) and is_packed(modules[0].teacher if algorithm == "kd" else modules[0].reference)
    assert not is_packed(modules[1].policy)
    start = {k: v.clone() for k, v in named_weights(load_causal_lm(model))}
    assert max(float((packed[f"policy.{k}"] - v).abs().max()) for k, v in start.items()) > 1e-3
    # Adam's first steps are the sign of a gradient times lr, which rounding may turn where a gradient is all but 0
    worst = {k: float((packed[k] - padded[k]).abs().quantile(0.99)) for k in packed}
    assert max(worst.values()) < 2e-5, worst
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


def test_the_budget_of_packed_rows_counts_real_tokens():
    rng = random.Random(1)
    lengths = [rng.randint(1, 60) for _ in range(40)]
    groups = micro_batches(lengths, range(40), 100, packed=True)
    assert sorted(i for g in groups for i in g) == list(range(40))
    sums = [sum(lengths[i] for i in g) for g in groups]
    assert max(sums) <= 100
    assert len(groups) <= sum(lengths) // 100 + 2 < len(micro_batches(lengths, range(40), 100))
    assert micro_batches([500, 3, 4], [0, 1, 2], 100, packed=True) == [[0], [2, 1]]  # too long for the budget: alone


def test_what_cannot_be_packed_says_so(model_dir, tmp_path):
    from transformers import Qwen3NextConfig

    with pytest.raises(ValueError, match="attention is 'eager'; with packing: true expected one of sdpa"):
        GRPO(str(model_dir), attention="eager", packing=True)
    with pytest.raises(ValueError, match="set packing: true and attention: sdpa"):
        GRPO(str(model_dir), attention="packed")
    with pytest.raises(ValueError, match="'flash_attention_2', whose package flash_attn is not installed"):
        load_causal_lm(str(model_dir), attention="packed_fa2")
    model = load_causal_lm(str(model_dir), attention="packed")
    with pytest.raises(ValueError, match="called without sequence boundaries"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    model.config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"\(qwen3_next\) has layers of type linear_attention"):
        packing.check_body(model, "p")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_kernel_for_cuda_says_what_padded_attention_says(folder):
    """bfloat16: both round to 8 bits after every product, over two layers. Not run so far; the bounds are reckoned."""
    batch = collate(make_trajectories(6, seed=2), "cuda")
    found = []
    for attention in ("packed", "sdpa"):
        model = load_causal_lm(folder, "bfloat16", attention).cuda()
        stats = token_logprobs(model, batch)
        stats.logprobs.sum().backward()
        found.append((stats.logprobs, model.base_model.layers[0].self_attn.k_proj.weight.grad.float()))
    (packed, gradient), (padded, expected) = found
    assert torch.allclose(packed, padded, atol=0.3) and (packed - padded).abs().mean() < 0.05
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.99
