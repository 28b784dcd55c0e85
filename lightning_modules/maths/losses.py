"""GRPO from rewards to loss, and the token losses of the other algorithms, as pure functions on tensors.

Every loss returns ``(total, count)``: the sum over the given tokens (a scalar with gradient) and the sum of their
weights. No loss takes a mean, because the divisor is the count of the whole optimiser step, over all micro-batches and
all ranks; ``OnPolicyModule`` divides by it. A mean of micro-batch means would weigh tokens by the split.

Shapes: ``_BT`` means [B, T] trajectories by token positions; entry t belongs to token t given the tokens before t.
``mask_BT`` is 0 where a token does not count; other values weigh it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.batch import RowTensors

Aggregation = Literal["token_mean", "sequence_mean"]
Convention = Literal["std", "centred", "leave_one_out"]
Singleton = Literal["zero", "reward"]
Estimator = Literal["k1", "k2", "k3"]

STD_EPS = 1e-6  # verl's epsilon; TRL takes 1e-4
LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: beyond it float32 products overflow; same bound as verl's core_algos.py
K3_LIMIT = 10.0  # verl clamps k3 to +-10: one token that the teacher finds impossible must not own the batch


# ---------------------------------------------------------------------- GRPO
@dataclass(frozen=True, slots=True)
class TokenWeights(RowTensors):
    """Weights of each token in the policy's loss [B, T] float32, 0 where the policy did not sample it. No gradient.

    A loss sums ``product`` times its term of each token. The module divides by the sum of ``aggregation``, so masking
    tokens makes a step smaller and does not make the other tokens heavier. For example, with ``mask_ratio: [0.5, 2]``
    and ``importance_cap: 2``, for four sampled tokens in a mean over tokens::

        r             1.0   0.1   1.8   1.1
        mask          1     1     1     1          an auxiliary loss (KL, entropy) takes ``aggregation``
        aggregation   1     1     1     1
        correction    1.0   0     1.8   1.1
        kept          1     0     1     1          the tokens of a ratio of whole sequences
    """

    mask: Tensor  # 1: sampled by the policy itself, which a guide's tokens are not
    aggregation: Tensor  # share in the mean: 1 (token_mean), or 1 / tokens of the row (sequence_mean)
    correction: Tensor  # min(r, importance_cap), 0 where mask_ratio masks the token; equals the mask without options

    @property
    def product(self) -> Tensor:
        return self.aggregation * self.correction

    @property
    def kept(self) -> Tensor:
        """Mask [B, T] of the sampled tokens that ``mask_ratio`` keeps in the policy's loss."""
        return (self.correction != 0).to(self.mask.dtype)

    @property
    def kept_rows(self) -> Tensor:
        """Mask [B] of the rows with at least one kept token (``kept``)."""
        return self.kept.amax(1)


@dataclass(frozen=True, slots=True)
class LossInputs(RowTensors):
    """Inputs of a policy loss that are fixed before the update; [B, T] float32, 0 where the mask is 0."""

    advantages: Tensor
    old_logprobs: Tensor | None  # None: the log-probs of the forward pass itself, without gradient
    reference_logprobs: Tensor | None = None  # None without a KL
    transforms: tuple[RowTensors | None, ...] = ()  # what each advantage transform keeps for its own loss
    spans: Tensor | None = None  # [B, T] int64, the span of each token whose ratio it has, from 1; None: its own


def grpo_loss(
    logprobs_BT: Tensor,
    entropy_BT: Tensor,
    inputs: LossInputs,
    weights: TokenWeights,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    clip_balanced: bool = False,
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy_coef: float = 0.0,
) -> Tensor:
    """Return GRPO's loss summed over the tokens, a scalar with gradient (arXiv 2402.03300)::

        rho = pi / pi_old
        l   = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0
        L   = sum (w l + kl_coef KL(pi, pi_ref) - entropy_coef H)        w: ``weights.product``

    KL and entropy are weighted by ``weights.aggregation``: the correction for the sampler concerns the policy's term.

    Args:
        logprobs_BT: log pi of the sampled tokens, with gradient.
        entropy_BT: H, the policy's entropy in nats, with gradient.
        inputs: A, log pi_old and log pi_ref. Without log pi_ref the KL is left out.
        weights: of each token.
        clip_low: how far below 1 the ratio may help.
        clip_high: how far above 1 the ratio may help.
        dual_clip: bound on the loss of tokens with negative advantage; None for none.
        clip_balanced: keep a gradient above the clip's range, see ``clip_balanced_loss``.
        kl_coef: weight of the KL.
        kl_estimator: see ``sampled_kl``.
        entropy_coef: weight of the entropy bonus.
    """
    old = logprobs_BT.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    clipped_loss = clip_balanced_loss if clip_balanced else ppo_clip_loss
    loss, _ = clipped_loss(logprobs_BT, old, inputs.advantages, weights.product, clip_low, clip_high, dual_clip)
    if inputs.reference_logprobs is not None:
        kl = sampled_kl(logprobs_BT, inputs.reference_logprobs, kl_estimator)
        loss = loss + kl_coef * masked_sum(kl, weights.aggregation)[0]
    if entropy_coef:
        loss = loss - entropy_coef * masked_sum(entropy_BT, weights.aggregation)[0]
    return loss


def group_advantages(
    rewards_B: Tensor,
    groups: Sequence[str],
    convention: Convention = "std",
    singleton: Singleton = "zero",
    members: Sequence[int] | None = None,
) -> Tensor:
    """Return the advantage of each trajectory relative to its group [B]. No gradient; computed in float64.

    ===============  ==========================================  ==============================
    convention       advantage                                   rewards [1, 0, 0, 1] become
    ===============  ==========================================  ==============================
    std              (r - mean) / (unbiased std + 1e-6)          +-0.866   GRPO in verl, Search-R1
    centred          r - mean                                    +-0.5     Dr. GRPO (arXiv 2503.20783)
    leave_one_out    r - mean of the others                      +-0.667   RLOO (arXiv 2402.14740)
    ===============  ==========================================  ==============================

    Equal rewards give exactly 0, whatever the rounding. A group is all trajectories of one prompt and never spans
    ranks, so this function does not communicate.

    Args:
        rewards_B: outcome of each trajectory.
        groups: group of each trajectory.
        convention: see above.
        singleton: advantage of the only trajectory of a group. ``zero``: it teaches nothing. ``reward``: the advantage
            is the reward (verl, which takes mean 0 and std 1 there), so non-negative rewards push up every sample.
        members: number of each trajectory in its group. Rows of one trajectory (its turns or conversations) have the
            same number, and count once in mean and std. By default every row is a trajectory.

    Raises:
        ValueError: unknown convention.
    """
    if members is not None:
        places: dict[tuple[str, int], int] = {}
        index = [places.setdefault(key, len(places)) for key in zip(groups, members, strict=True)]
        first = [index.index(place) for place in range(len(places))]
        return group_advantages(rewards_B[first], [groups[row] for row in first], convention, singleton)[index]
    if convention not in ("std", "centred", "leave_one_out"):
        raise ValueError(f"unknown group advantage '{convention}'; expected std, centred or leave_one_out")
    advantages = torch.zeros_like(rewards_B)
    for rows in members_of(groups).values():
        rewards = rewards_B[rows].double()
        n = len(rows)
        if n == 1:
            advantages[rows] = rewards_B[rows] if singleton == "reward" else 0.0
        elif rewards.max() > rewards.min():
            scale = {"std": 1.0 / (rewards.std() + STD_EPS), "centred": 1.0, "leave_one_out": n / (n - 1)}[convention]
            advantages[rows] = ((rewards - rewards.mean()) * scale).to(advantages.dtype)
    return advantages


def zero_variance_groups(rewards_B: Tensor, groups: Sequence[str]) -> int:
    """Count the groups that have nothing to compare: equal rewards, or a single trajectory."""
    return sum(bool((rewards_B[rows] == rewards_B[rows[0]]).all()) for rows in members_of(groups).values())


def members_of(groups: Sequence[str]) -> dict[str, list[int]]:
    """Return the row numbers of each group, in order.

    >>> members_of(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return rows


# ---------------------------------------------------------------------- terms of a loss
def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of values * mask and the sum of the mask. Values may be NaN where the mask is 0."""
    weights = mask_BT.to(values_BT.dtype)
    return (torch.where(weights != 0, values_BT, torch.zeros_like(values_BT)) * weights).sum(), weights.sum()


def aggregation_weights(mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """Return the weight of each token in a mean over a mini-batch [B, T]. The sum of the weights is the divisor.

    ``token_mean``: every token weighs 1, and the divisor counts tokens (verl's token-mean, DAPO). ``sequence_mean``:
    the tokens of a sequence share 1, and the divisor counts sequences with tokens (GRPO as papers write it:
    1/G sum_i 1/|y_i| sum_t). Rows must be whole.

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
    """Compute pi / pi_old per token [B, T]. The log-ratio is clamped to +-20 so that the ratio stays finite."""
    return (logprobs_BT - old_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sampled_kl(student_logprobs: Tensor, teacher_logprobs: Tensor, estimator: Estimator = "k1") -> Tensor:
    """Estimate KL(student || teacher) per token, for tokens sampled from the student.

    With d = log p - log q: ``k1 = d`` (unbiased, can be negative), ``k2 = d^2 / 2`` (biased, its gradient is that of
    the KL), ``k3 = exp(-d) - 1 + d`` (unbiased, never negative; clamped to 10 as in verl's ``low_var_kl``).
    Source: joschu.net/blog/kl-approx.html; see docs/algorithms/dgpo.md. DGPO's verl fork calls minus k1
    ``rkl``; its ``low_var_rkl`` estimates no KL and is not available here.

    Raises:
        ValueError: unknown estimator.
    """
    difference = student_logprobs - teacher_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        difference = difference.clamp(-20.0, 20.0)
        return ((-difference).exp() - 1.0 + difference).clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"unknown KL estimator '{estimator}'; expected k1, k2 or k3")


def ppo_clip_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped policy loss, to be minimised, as (sum over tokens, sum of weights) (arXiv 1707.06347, eq.
    7)::

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
    """Return AEPO's clipped policy loss as (sum over tokens, sum of weights). It has the value of ``ppo_clip_loss``,
    but another gradient (arXiv 2510.14545; docs/algorithms/arpo.md).

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
    """Return the larger of the clipped and the unclipped loss of each token. With a dual clip it is at most -A
    dual_clip where A < 0."""
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
    """Return a mask [B, T] of the tokens whose gradient the clip removes: the ratio is outside its range, on the side
    the advantage pushes."""
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
    """Return the critic's clipped squared error as (sum over tokens, sum of weights). It is ``0.5 max((V - R)^2,
    (clip(V, V_old - clip, V_old + clip) - R)^2)``; ``clip=None`` is the plain square.

    Source: verl core_algos.compute_value_loss, as in DGPO (docs/algorithms/dgpo.md).
    """
    error = (values_BT - returns_BT).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values_BT, old_values_BT - clip), old_values_BT + clip)
        error = torch.maximum(error, (near - returns_BT).square())
    return masked_sum(0.5 * error, mask_BT)
