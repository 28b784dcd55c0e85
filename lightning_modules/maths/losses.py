"""Token losses as pure functions: torch only.

Every function returns ``(total, count)``: the sum over the given tokens (a scalar with gradient) and how much that
sum weighs.  Nothing is averaged here, because the right divisor is the token count of the whole optimiser step, over
all micro-batches and all ranks; the shared modules divide by it.  A mean of micro-batch means would weigh tokens by
the luck of the split.

Shapes: ``_BT`` means [B, T] trajectories by token positions; entry t belongs to token t given tokens before t.
``mask_BT`` is 0 where a token does not count; other values weigh it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: beyond it float32 products overflow; same bound as verl's core_algos.py


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """``(sum of values * mask, sum of mask)``; values where the mask is 0 may be anything, NaN included."""
    weights = mask_BT.to(values_BT.dtype)
    return (torch.where(weights != 0, values_BT, torch.zeros_like(values_BT)) * weights).sum(), weights.sum()


def aggregation_weights(mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """What each token weighs in a mean over a mini-batch [B, T]; the sum of the weights is what divides.

    ``token_mean``: every token 1, so the divisor counts tokens (verl's token-mean, DAPO).  ``sequence_mean``: the
    tokens of a sequence share 1, so the divisor counts sequences that have any (GRPO as papers write it:
    1/G sum_i 1/|y_i| sum_t).  Rows must be whole.

    >>> aggregation_weights(torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]), "sequence_mean").tolist()
    [[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]

    Raises:
        ValueError: unknown aggregation.
    """
    if aggregation == "token_mean":
        return mask_BT
    if aggregation == "sequence_mean":
        return mask_BT / mask_BT.sum(1, keepdim=True).clamp(min=1.0)
    raise ValueError(f"unknown aggregation '{aggregation}'; expected token_mean or sequence_mean")


def importance_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """pi_theta / pi_old per token [B, T]; the log-ratio is clamped to +-20 so that the ratio stays finite."""
    return (logprobs_BT - old_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ppo_clip_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped policy loss, to be minimised (PPO, arXiv 1707.06347, eq. 7)::

        r = pi_theta / pi_old          l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        dual clip c (arXiv 1912.09729, eq. 5), where A < 0:          l = min(l, -A c)

    ``clip_high > clip_low`` is DAPO's clip-higher.

    Raises:
        ValueError: if ``dual_clip`` is not above 1.
    """
    ratio = importance_ratio(logprobs_BT, old_logprobs_BT)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return masked_sum(_pessimistic(ratio, clipped, advantages_BT, dual_clip), mask_BT)


def clip_balanced_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """AEPO's clipped loss (arXiv 2510.14545; docs/papers/arpo.md 3): the value of ``ppo_clip_loss``, another gradient.

    The upper bound is ``(1 + clip_high) r / stopgrad(r)``: a token that has already become likelier than the bound
    still pushes, with the bound as its factor instead of r, where the ordinary clip drops it.  Gradient of the
    objective with respect to the log-prob, divided by A::

        A > 0, r > 1 + clip_high:  1 + clip_high        A < 0, r < 1 - clip_low:  0        else:  r
        (and 0 where the dual clip takes hold)

    Raises:
        ValueError: if ``dual_clip`` is not above 1.
    """
    ratio = importance_ratio(logprobs_BT, old_logprobs_BT)
    one = (logprobs_BT - logprobs_BT.detach()).exp()  # r / stopgrad(r)
    clipped = torch.where(ratio > 1.0 + clip_high, (1.0 + clip_high) * one, ratio.clamp(min=1.0 - clip_low))
    return masked_sum(_pessimistic(ratio, clipped, advantages_BT, dual_clip), mask_BT)


def _pessimistic(ratio: Tensor, clipped: Tensor, advantages: Tensor, dual_clip: float | None) -> Tensor:
    """The larger of the two losses; with a dual clip, where A < 0, at most -A dual_clip."""
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; expected a number above 1 (3.0 is usual) or null")
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def clip_events(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """1.0 where the clip removes the gradient of a token [B, T] (ratio outside, on the side the advantage pushes)."""
    ratio = importance_ratio(logprobs_BT, old_logprobs_BT)
    over = (ratio > 1.0 + clip_high) & (advantages_BT > 0)
    under = (ratio < 1.0 - clip_low) & (advantages_BT < 0)
    return (over | under).to(logprobs_BT.dtype)


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    clip: float | None = 0.5,
) -> tuple[Tensor, Tensor]:
    """``0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``; ``clip=None`` is the plain square.

    Source: verl core_algos.compute_value_loss, as in DGPO (docs/papers/dgpo.md 2.3).
    """
    error = (values_BT - returns_BT).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values_BT, old_values_BT - clip), old_values_BT + clip)
        error = torch.maximum(error, (near - returns_BT).square())
    return masked_sum(0.5 * error, mask_BT)


def entropy_sum(entropy_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Summed entropy in nats; subtract ``coefficient * total / count`` from a loss for an entropy bonus."""
    return masked_sum(entropy_BT, mask_BT)
