"""Losses against values worked by hand and a slow independent form, gradients included."""

import math

import pytest
import torch

from lightning_modules import losses


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


def test_ppo_clip_low_and_high_differ():
    new, old, advantages, mask = tensors([math.log(1.25), math.log(0.75)], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0])
    total, _ = losses.ppo_clip_loss(new, old, advantages, mask, clip_low=0.1, clip_high=0.28)
    assert total.item() == pytest.approx(-1.25 + 0.9)


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
