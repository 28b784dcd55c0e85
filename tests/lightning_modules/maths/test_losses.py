"""Losses against values worked by hand and a slow independent form, gradients included."""

import math

import pytest
import torch

from lightning_modules.maths import losses


def tensors(*rows):
    return [torch.tensor([row], dtype=torch.float64) for row in rows]


def test_ppo_clip_by_hand():
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1 and clip 0.2
    log = [math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)]
    new, old, advantages, mask = tensors(log, [0.0] * 4, [1.0, 1.0, -1.0, -1.0], [1.0] * 4)
    new.requires_grad_()
    total, count = losses.ppo_clip_loss(new, old, advantages, mask)
    assert total.item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8)
    assert count.item() == 4
    total.backward()
    assert new.grad[0].tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])  # clipped sides give no gradient
    assert losses.clip_events(new, old, advantages)[0].tolist() == [1, 0, 0, 1]


def test_dual_clip_bounds_only_negative_advantages():
    new, old, advantages, mask = tensors([math.log(10.0), math.log(10.0)], [0.0, 0.0], [-1.0, 1.0], [1.0, 1.0])
    total, _ = losses.ppo_clip_loss(new, old, advantages, mask, dual_clip=3.0)
    assert total.item() == pytest.approx(3.0 - 1.2)
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        losses.ppo_clip_loss(new, old, advantages, mask, dual_clip=1.0)


def test_ratio_stays_finite_where_the_policies_have_parted():
    new, old, advantages, mask = tensors([-1.0, -500.0], [-500.0, -1.0], [-1.0, 1.0], [1.0, 1.0])
    total, _ = losses.ppo_clip_loss(new, old, advantages, mask)
    assert torch.isfinite(total)


def test_value_loss_by_hand():
    # |V - R| = 2, |clipped - R| = 2.5: the worse of the two counts, and the clipped one has no gradient
    values, old, returns, mask = tensors([3.0, 1.2], [2.0, 1.0], [5.0, 1.0], [1.0, 1.0])
    values.requires_grad_()
    total, count = losses.value_loss(values, old, returns, mask, clip=0.5)
    assert total.item() == pytest.approx(0.5 * 2.5**2 + 0.5 * 0.2**2)
    total.backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.2])
    plain, _ = losses.value_loss(values, old, returns, mask, clip=None)
    assert plain.item() == pytest.approx(0.5 * 2.0**2 + 0.5 * 0.2**2)
    assert count.item() == 2


def test_masked_out_tokens_may_be_nan():
    values, mask = tensors([1.0, float("nan"), 3.0], [1.0, 0.0, 2.0])
    values.requires_grad_()
    total, count = losses.masked_sum(values, mask)
    total.backward()
    assert (total.item(), count.item()) == (7.0, 3.0)
    assert values.grad[0].tolist() == [1.0, 0.0, 2.0]


def test_empty_mask_gives_a_zero_tied_to_the_graph():
    new, old, advantages, mask = tensors([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0], [0.0, 0.0])
    new.requires_grad_()
    total, count = losses.ppo_clip_loss(new, old, advantages, mask)
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0.0)
    assert new.grad[0].tolist() == [0.0, 0.0]


def test_grpo_by_hand():
    """Ratios 1.5 and 0.5, advantages +1 and -1; the second token has half the correction and no part in the mean."""
    new, old, reference, advantages = tensors([math.log(1.5), math.log(0.5)], [0.0, 0.0], [0.0, 0.0], [1.0, -1.0])
    entropy, on, correction = tensors([0.3, 0.7], [1.0, 1.0], [1.0, 0.5])
    inputs, weights = losses.LossInputs(advantages, old, reference), losses.TokenWeights(on, on, correction)
    options = {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01}
    policy, kl = -1.2 + 0.5 * 0.8, 0.5 * (math.log(1.5) ** 2 + math.log(0.5) ** 2)
    loss = losses.grpo_loss(new, entropy, inputs, weights, **options)
    assert loss.item() == pytest.approx(policy + 0.1 * kl - 0.01 * 1.0)
    assert losses.grpo_loss(new, entropy, losses.LossInputs(advantages, old), weights).item() == pytest.approx(policy)
    fresh = new.clone().requires_grad_()
    losses.grpo_loss(fresh, entropy, losses.LossInputs(advantages, None), weights).backward()
    assert fresh.grad[0].tolist() == [-1.0, 0.5], "without old log-probs every ratio is 1"


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_clip_balanced_against_a_slow_form(dual_clip):
    """Random tokens; the gradient written down case by case, the value by the definition of the ordinary clip."""
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(4, 50, generator=generator, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()
    low, high, total, gradient = 0.2, 0.28, 0.0, torch.zeros_like(new)
    for i in range(4):
        for t in range(50):
            a, r = float(advantages[i, t]), math.exp(float(new.detach()[i, t] - old[i, t]))
            value = min(r * a, min(max(r, 1 - low), 1 + high) * a)
            factor = 1 + high if a > 0 and r > 1 + high else 0.0 if a < 0 and r < 1 - low else r
            if dual_clip is not None and a < 0 and value < dual_clip * a:
                value, factor = dual_clip * a, 0.0
            total, gradient[i, t] = total - value, -factor * a
    loss, _ = losses.clip_balanced_loss(new, old, advantages, torch.ones_like(new), low, high, dual_clip)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-9)
    assert torch.allclose(new.grad, gradient, atol=1e-9)
    with pytest.raises(ValueError, match="dual_clip is 0.5"):
        losses.clip_balanced_loss(new, old, advantages, torch.ones_like(new), dual_clip=0.5)


def test_aggregations_by_hand():
    """Sequences of 1, 3 and no model tokens."""
    mask = torch.tensor([[0.0, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    values = torch.tensor([[9.0, 4.0, 9.0, 9.0], [1.0, 9.0, 2.0, 3.0], [9.0] * 4])
    tokens, sequences = (losses.aggregation_weights(mask, name) for name in ("token_mean", "sequence_mean"))
    total, count = losses.masked_sum(values, tokens)
    assert (total.item(), count.item()) == (10.0, 4.0)
    total, count = losses.masked_sum(values, sequences)
    assert (total.item(), count.item()) == pytest.approx((4.0 + 2.0, 2.0))
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; expected token_mean or sequence_mean"):
        losses.aggregation_weights(mask, "mean")
