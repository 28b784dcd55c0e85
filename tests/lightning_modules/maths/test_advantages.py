"""GAE, whitening and RLSD: by hand, against a slow form, and the two conventions side by side."""

import math

import pytest
import torch

from common.schedules import Schedule
from lightning_modules.maths.advantages import gae, last_token, rlsd_advantages, whiten

MASK = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0.0]])  # prompt, sampled, observation, sampled, padding
STEPS = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0.0]])  # observations included


def slow_gae(rewards, values, mask, gamma, lam):
    """Straight from the definition A_t = sum_l (gamma lam)^l delta_{t+l}, over the kept tokens of one row."""
    kept = [t for t in range(len(mask)) if mask[t]]
    deltas = []
    for i, t in enumerate(kept):
        following = values[kept[i + 1]] if i + 1 < len(kept) else 0.0
        deltas.append(rewards[t] + gamma * following - values[t])
    out = [0.0] * len(mask)
    for i, t in enumerate(kept):
        out[t] = sum((gamma * lam) ** n * d for n, d in enumerate(deltas[i:]))
    return out


def random_case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(2, 7, generator=generator) * MASK
    return rewards, torch.randn(2, 7, generator=generator)


@pytest.mark.parametrize("mask", [MASK, STEPS])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_gae_against_the_definition(mask, gamma, lam):
    rewards, values = random_case()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row in range(2):
        args = (rewards[row].tolist(), values[row].tolist(), mask[row].tolist())
        assert advantages[row].tolist() == pytest.approx(slow_gae(*args, gamma, lam), abs=1e-5)
    assert torch.allclose(returns, (advantages + values) * mask)


def test_gae_without_any_token():
    advantages, returns = gae(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2


def test_last_token():
    assert last_token(MASK).nonzero().tolist() == [[0, 5], [1, 4]]
    assert last_token(torch.zeros(1, 3)).sum() == 0


def test_whiten_convention():
    """[1, 0, 0, 1] -> +-0.866: unbiased standard deviation (verl), not +-1.0 (population)."""
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    expected = [[0.8660, -0.8660], [-0.8660, 0.8660]]
    assert torch.allclose(whiten(values, torch.ones(2, 2)), torch.tensor(expected), atol=1e-4)


def test_whiten_ignores_and_zeroes_what_is_masked_out():
    values = torch.tensor([[1.0, 99.0, 3.0, float("nan")]])
    out = whiten(values, torch.tensor([[1, 0, 1, 0]]))
    assert out[0].tolist() == pytest.approx([-0.7071, 0.0, 0.7071, 0.0], abs=1e-4)


@pytest.mark.parametrize("values", [[[2.0, 2.0]], [[2.0, 0.0]]])
def test_whiten_equal_values_or_one_token_is_zero(values):
    values = torch.tensor(values)
    assert whiten(values, values != 0).abs().max() < 1e-6


def test_whiten_adds_sums_over_ranks():
    """Two ranks with half of the values each, the other's sums supplied by hand, equal one rank with all."""
    a, b = torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 8.0]])
    mean = 4.0
    others = iter([torch.tensor([10.0, 2.0]), torch.tensor([(2 - mean) ** 2 + (8 - mean) ** 2])])
    mine = whiten(a, torch.ones(1, 2), reduce=lambda sums: sums + next(others))
    assert torch.allclose(mine, whiten(torch.cat([a, b]), torch.ones(2, 2))[:1])


# ---------------------------------------------------------------------- RLSD
def test_rlsd_by_hand():
    """Good and bad trajectory; Delta small, large, negative, large negative; lam .5, clip .2."""
    gap = torch.tensor([[0.1, 3.0, -0.1, -3.0, 0.0]] * 3, dtype=torch.float64)
    advantages = torch.tensor([[2.0], [-2.0], [0.0]], dtype=torch.float64).expand(3, 5).clone().requires_grad_()
    found = rlsd_advantages(advantages, gap.requires_grad_(), lam=0.5, eps=0.2)
    up, down = math.exp(0.1), math.exp(-0.1)
    factors = [(1 + up) / 2, 1.1, (1 + down) / 2, 0.9, 1.0]
    mirrored = [(1 + down) / 2, 0.9, (1 + up) / 2, 1.1, 1.0]
    assert found[0].tolist() == pytest.approx([2 * f for f in factors])
    assert found[1].tolist() == pytest.approx([-2 * f for f in mirrored]), "less blame for what the teacher likes"
    assert found[2].tolist() == [0.0] * 5 and not found.requires_grad
    assert torch.equal(rlsd_advantages(advantages, gap, lam=0.0), advantages)
    assert rlsd_advantages(advantages, gap, 1.0, 0.05)[0].tolist() == pytest.approx([2.1, 2.1, 1.9, 1.9, 2.0])


def test_rlsd_where_models_do_not_agree_at_all_and_where_nothing_is_known():
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0, 0.0]])
    gap = torch.tensor([[1e4, 1e4, -1e4, -1e4, math.nan, math.inf]])
    assert rlsd_advantages(advantages, gap, 1.0).tolist() == [pytest.approx([1.2, -0.8, 0.8, -1.2, 0.0, 0.0])]
    for lam, eps in ((1.1, 0.2), (-0.1, 0.2), (0.5, 1.5)):
        with pytest.raises(ValueError, match=f"RLSD's lam is {lam} and eps {eps}; expected both from 0 to 1"):
            rlsd_advantages(advantages, gap, lam, eps)


def test_rlsds_lam_falls_to_zero_in_a_line():
    falls = Schedule(0.5, 0.0, 100)
    assert [falls(step) for step in (0, 50, 99, 100, 150)] == pytest.approx([0.5, 0.25, 0.005, 0, 0])
