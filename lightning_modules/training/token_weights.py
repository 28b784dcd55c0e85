"""Weights of tokens in the policy's loss: loss mask, aggregation, off-policy correction.

Sampler and trainer differ because the engine computes otherwise than the trainer does, and, where batches are generated
ahead (``data.max_off_policy_iterations``), because its weights are older. The correction is about the ratio

    r_t = pi_old(y_t) / pi_sampler(y_t)        pi_old: the trainer at the start of the iteration

of sampled tokens, or of sequences: the geometric mean of r over a row's sampled tokens. None of it has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from common.ranges import AboveOne, BelowOne
from lightning_modules import ranks
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.maths.losses import importance_ratio

if TYPE_CHECKING:
    from lightning_modules.metrics import StepMetrics
    from rollout.trajectory import Trajectory

Level = Literal["token", "sequence"]
MaskRatio = tuple[BelowOne, AboveOne]


@dataclass(frozen=True, slots=True)
class TokenWeights(RowTensors):
    """What each token weighs in the policy's loss [B, T] float32, 0 where the policy did not sample it. No gradient.

    A loss sums ``product`` times its term of each token; the module divides by the sum of ``aggregation``, so that
    leaving tokens out makes a step smaller rather than the other tokens heavier. For example, with
    ``mask_ratio: [0.5, 2]`` and ``importance_cap: 2``, of four sampled tokens in a mean over tokens::

        r             1.0   0.1   1.8   1.1
        mask          1     1     1     1          an auxiliary loss (KL, entropy) takes ``aggregation``
        aggregation   1     1     1     1
        correction    1.0   0     1.8   1.1
        kept          1     0     1     1          what a ratio of whole sequences is formed over
    """

    mask: Tensor  # 1: sampled
    aggregation: Tensor  # share in the mean: 1 (token_mean), or 1 / tokens of the row (sequence_mean)
    correction: Tensor  # min(r, importance_cap), 0 where mask_ratio leaves the token out; the mask without options

    @property
    def product(self) -> Tensor:
        return self.aggregation * self.correction

    @property
    def kept(self) -> Tensor:
        """1 for the sampled tokens that ``mask_ratio`` does not leave out."""
        return (self.correction != 0).to(self.mask.dtype)

    @property
    def kept_rows(self) -> Tensor:
        """[B]: 1 for the rows that have such a token."""
        return self.kept.amax(1)


@dataclass(frozen=True, slots=True)
class Correction:
    """Truncated importance sampling and masking of extreme ratios; see ``OnPolicyModule`` for the options.

    Raises:
        ValueError: impossible options, or some that would have no effect.
    """

    cap: float | None = None
    level: Level = "token"
    mask_ratio: MaskRatio | None = None
    mask_level: Level = "token"

    def __post_init__(self) -> None:
        for name, value in (("importance_level", self.level), ("mask_level", self.mask_level)):
            if value not in get_args(Level):
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(Level))}")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"importance_cap is {self.cap}; expected at least 1 (2.0 is usual) or null")
        if self.mask_ratio is not None:
            low, high = self.mask_ratio
            if not 0 <= low < 1 < high:
                raise ValueError(
                    f"mask_ratio is ({low}, {high}); expected a low bound from 0 to below 1 and a high one above 1, "
                    "such as (0.5, 2.0), or null"
                )
        if self.cap is None and self.level != "token":
            raise ValueError("importance_level has no effect without importance_cap; set both or none")
        if self.mask_ratio is None and self.mask_level != "token":
            raise ValueError("mask_level has no effect without mask_ratio; set both or none")

    @property
    def active(self) -> bool:
        return self.cap is not None or self.mask_ratio is not None

    def weights(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """What each sampled token's part in the policy's loss is multiplied by [B, T]; without options the mask."""
        weights = batch.mask.clone()
        if self.cap is not None:
            weights = weights * ratios(old_logprobs_BT, batch, self.level).clamp(max=self.cap)
        return weights * (1.0 - self.masked(old_logprobs_BT, batch))

    def truncated(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """1 where the cap took hold [B, T]."""
        if self.cap is None:
            return torch.zeros_like(batch.mask)
        return (ratios(old_logprobs_BT, batch, self.level) > self.cap) * batch.mask

    def masked(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """1 where a token is left out, or its sequence is [B, T]."""
        if self.mask_ratio is None:
            return torch.zeros_like(batch.mask)
        found = ratios(old_logprobs_BT, batch, self.mask_level)
        return ((found < self.mask_ratio[0]) | (found > self.mask_ratio[1])) * batch.mask


def ratios(old_logprobs_BT: Tensor, batch: TokenBatch, level: Level = "token") -> Tensor:
    """r [B, T] where the mask is 1, else 0; of level sequence, the geometric mean over the row on all its tokens. The
    log-ratio is clamped to +-20."""
    if level == "token":
        return importance_ratio(old_logprobs_BT, batch.sampler_logprobs) * batch.mask
    gaps = (old_logprobs_BT - batch.sampler_logprobs) * batch.mask
    mean = gaps.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1.0)
    return importance_ratio(mean, torch.zeros_like(mean)) * batch.mask


def log_mismatch(
    metrics: StepMetrics,
    trajectories: Sequence[Trajectory],
    batch: TokenBatch,
    old_logprobs: Tensor,
    correction: Correction,
    version: int,
) -> None:
    """Log, over the sampled tokens of the whole batch and all ranks (every rank must call):

    ``train/logprob_gap`` and ``_max`` (|log r|), ``train/sampler_kl_k1`` and ``_k3`` (estimates of KL(sampler ||
    trainer) in nats: means of -log r and of r - 1 - log r), ``train/importance_ess`` (effective sample size,
    (sum r)^2 / (n sum r^2), as a share of the tokens: 1 where all ratios are alike), ``train/importance_truncated`` and
    ``train/importance_masked`` (shares of the tokens; 0 without the option), ``train/version_lag`` and ``_max``
    (iterations between the weights that sampled a token and those that learn from it).

    Args:
        trajectories: the rows of ``batch``.
        version: of the weights that learn, before the iteration's first update (iterations done).
    """
    count = batch.mask.sum()
    log_ratio = (old_logprobs - batch.sampler_logprobs) * batch.mask
    ratio = ratios(old_logprobs, batch)
    metrics.mean("train/logprob_gap", log_ratio.abs().sum(), count)
    metrics.mean("train/sampler_kl_k1", -log_ratio.sum(), count)
    metrics.mean("train/sampler_kl_k3", ((ratio - 1.0 - log_ratio) * batch.mask).sum(), count)
    metrics.mean("train/importance_truncated", correction.truncated(old_logprobs, batch).sum(), count)
    metrics.mean("train/importance_masked", correction.masked(old_logprobs, batch).sum(), count)
    if log_ratio.numel():
        metrics.maximum("train/logprob_gap_max", log_ratio.abs().max())
    sums = ranks.sum_over_ranks(torch.stack([ratio.double().sum(), ratio.double().square().sum(), count.double()]))
    total, squares, n = sums.tolist()
    if n:
        share = 1.0 / ranks.world_size()  # every rank adds the same number
        metrics.mean("train/importance_ess", total**2 / (n * squares) * share, share)
    lags = [(version - sampled, tokens) for t in trajectories for turn in t.turns for sampled, tokens in turn.versions]
    metrics.mean("train/version_lag", sum(lag * n for lag, n in lags), sum(n for _, n in lags))
    if lags:
        metrics.maximum("train/version_lag_max", max(lag for lag, _ in lags))
