"""ARPO's attributions and AEPO's objective, with a real model: where they agree with GRPO, and where they must not."""

import random

import pytest
import torch

from lightning_modules.algorithms.aepo import AEPO
from lightning_modules.algorithms.arpo import ARPO
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.batch import LogprobBatch, collate
from lightning_modules.models.policy import load_causal_lm, token_logprobs
from lightning_modules.training import optimisation
from rollout.trajectory import Reward, StopReason
from tests.lightning_modules.helpers import fit, make_group

FORKS = {1: (0, 1), 2: (1, 2), 4: (3, 1)}  # 2 branches off a branch


def branched(seed=0):
    rng = random.Random(seed)
    return make_group(rng, "q1", [1, 0, 1, 0, 1], FORKS) + make_group(rng, "q2", [0, 0, 1], {2: (0, 2)})


def gradients(module, batches, monkeypatch):
    """The policy's gradient before each optimiser step, as one vector; and the figures of the last iteration."""
    steps = []
    clip = optimisation.clip_gradients

    def record(*args):
        steps.append(torch.cat([p.grad.flatten().clone() for p in module.policy.parameters()]))
        return clip(*args)

    monkeypatch.setattr(optimisation, "clip_gradients", record)
    trainer = fit(module, batches)
    monkeypatch.undo()
    return steps, {k: float(v) for k, v in trainer.callback_metrics.items()}


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


# ---------------------------------------------------------------------- hard and soft
def test_hard_and_soft_agree_until_something_is_clipped(model_dir, monkeypatch):
    """Five passes over one batch: the first gradient is the same, the last ones are not."""
    options = {"lr": 3e-3, "num_mini_batches": 1, "epochs": 5, "max_grad_norm": 0.0}
    (soft, figures), (hard, _) = (
        gradients(ARPO(str(model_dir), attribution, **options), [branched()], monkeypatch)
        for attribution in ("soft", "hard")
    )
    scale = soft[0].abs().max()
    assert scale > 1e-3
    assert (soft[0] - hard[0]).abs().max() < 1e-5 * scale + 1e-7
    assert figures["train/clip_fraction"] > 0.1
    assert (soft[-1] - hard[-1]).abs().max() > 1e-2 * soft[-1].abs().max()


def test_hard_changes_what_shared_tokens_are_worth():
    rows = branched()
    batch = collate(rows)
    scores = LogprobBatch(torch.zeros_like(batch.mask))
    soft, hard = (ARPO("p", a).outcome_advantages(rows, batch, scores) for a in ("soft", "hard"))
    starts, first = batch.prompt_lengths, rows[1].fork.at
    shared = slice(int(starts[0]), int(starts[0]) + first)
    on = batch.mask[0, shared] == 1
    mean = soft[:3][:, shared][:, on].mean(0)  # 0, 1 and 2 hold these tokens
    assert mean.numel() and torch.allclose(hard[0, shared][on], mean, atol=1e-6)
    assert torch.equal(hard[0, shared], hard[1, shared]) and torch.equal(hard[1, shared], hard[2, shared])
    end = int(batch.lengths[2]) - 1
    assert hard[2, end] == soft[2, end] != 0
    assert torch.allclose((soft * batch.mask).sum(), (hard * batch.mask).sum(), atol=1e-4)


def test_a_failed_parent_is_known_to_its_children_in_training(model_dir):
    """2 took its first turn from 1, which took it from 0; without 1 they still share it."""
    rows = branched()[:3]
    rows[1] = rows[1].replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)
    rows[2] = rows[2].replace(reward=Reward(0.0))
    module, seen = ARPO(str(model_dir), "hard"), []
    compute = module.compute_advantages
    module.compute_advantages = lambda *args: seen.append(compute(*args)) or seen[-1]
    fit(module, [rows])
    start, first = len(rows[0].prompt_ids), branched()[1].fork.at
    advantages = seen[0].advantages
    assert not advantages[:, : start + first].any(), "+0.707 and -0.707 cancel where both hold the token"
    assert advantages[0, start + first :].max() > 0.7 and advantages[1, start + first :].min() < -0.7


@pytest.mark.parametrize("attribution", ["hard"])
def test_without_branches_arpo_is_grpo_exactly(model_dir, attribution):
    rng = random.Random(1)
    rows = make_group(rng, "q1", [1, 0, 0.5]) + make_group(rng, "q2", [1, 0, 0])
    common = {"lr": 1e-3, "epochs": 2}
    plain, arpo = GRPO(str(model_dir), **common), ARPO(str(model_dir), attribution, **common)
    for module in (plain, arpo):
        fit(module, [rows] * 2)
    assert torch.equal(weights(plain), weights(arpo))


# ---------------------------------------------------------------------- AEPO
def test_with_both_switches_off_aepo_is_arpo_exactly(model_dir):
    common = {"lr": 1e-3, "epochs": 3, "attribution": "hard"}
    plain = ARPO(str(model_dir), **common)
    off = AEPO(str(model_dir), clip_balanced=False, entropy_weight=0.0, **common)
    balanced, entropic = AEPO(str(model_dir), entropy_weight=0.0, **common), AEPO(str(model_dir), False, **common)
    for module in (plain, off, balanced, entropic):
        fit(module, [branched()])
    assert torch.equal(weights(plain), weights(off))
    assert not torch.equal(weights(plain), weights(balanced)) and not torch.equal(weights(plain), weights(entropic))


def test_advantages_are_scaled_by_the_entropy_of_the_old_policy(model_dir):
    rows = branched()
    module, seen, passes = AEPO(str(model_dir), entropy_weight=0.3, lr=1e-2), [], []
    compute, stats = module.compute_advantages, module._token_stats
    module.compute_advantages = lambda *args: seen.append((args[2], len(passes), compute(*args))) or seen[-1][2]
    module._token_stats = lambda *args: passes.append(1) or stats(*args)
    fit(module, [rows])
    scores, before, inputs = seen[0]
    assert before == 1, "entropies come with the old log-probs, from the same forward pass"
    batch = collate(rows)
    with torch.no_grad():
        truth = token_logprobs(load_causal_lm(str(model_dir)), batch)
    assert torch.allclose(scores.entropy, truth.entropy, atol=1e-4)
    assert torch.allclose(scores.old_logprobs, truth.logprobs, atol=1e-4)
    on = batch.mask == 1
    entropies = truth.entropy[on]
    z = (entropies - entropies.mean()) / entropies.std()
    plain = GRPO("p").outcome_advantages(rows, batch, scores)
    assert torch.allclose(inputs.advantages[on], plain[on] * (1 + 0.3 * z), atol=1e-3)
    assert not inputs.advantages[~on].any()


@pytest.mark.parametrize("aggregation", ["sequence_mean"])
def test_micro_batches_and_order_change_nothing(model_dir, aggregation):
    """The released AEPO would not pass: it standardises entropies within each micro-batch."""
    common = {"lr": 1e-3, "num_mini_batches": 1, "epochs": 3, "attribution": "hard", "aggregation": aggregation}
    whole = AEPO(str(model_dir), **common)
    split = AEPO(str(model_dir), max_tokens_per_micro_batch=1, logits_chunk=3, **common)
    one, other = fit(whole, [branched()]), fit(split, [branched()[::-1]])
    assert (weights(whole) - weights(split)).abs().max() < 5e-5
    for name, value in one.callback_metrics.items():
        assert float(other.callback_metrics[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name
    assert float(one.callback_metrics["train/clip_fraction"]) > 0
