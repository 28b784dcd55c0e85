"""Off-policy correction of the policy's loss: truncated importance sampling and masking of extreme ratios.

Sampler and trainer disagree because the engine computes differently, and, with batches generated ahead
(``data.max_off_policy_iterations``), because the sampler's weights are older. The correction uses the ratio

    r_t = pi_old(y_t) / pi_sampler(y_t)        pi_old: the trainer at the start of the iteration

of sampled tokens, or of sequences: the geometric mean of r over a row's sampled tokens. No gradient flows through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.ranges import AboveOne, BelowOne
from lightning_modules.batch import TokenBatch
from lightning_modules.maths.losses import importance_ratio

Level = Literal["token", "sequence"]
MaskRatio = tuple[BelowOne, AboveOne]


@dataclass(frozen=True, slots=True)
class Correction:
    """Corrects the policy's loss for differences between sampler and trainer: truncated importance sampling, and
    masking of extreme ratios. See ``OnPolicyModule`` for the options.

    Raises:
        ValueError: a level without the option that it belongs to.
    """

    cap: float | None = None
    level: Level = "token"
    mask_ratio: MaskRatio | None = None
    mask_level: Level = "token"

    def __post_init__(self) -> None:
        if self.cap is None and self.level != "token":
            raise ValueError("importance_level has no effect without importance_cap; set both or none")
        if self.mask_ratio is None and self.mask_level != "token":
            raise ValueError("mask_level has no effect without mask_ratio; set both or none")

    @property
    def active(self) -> bool:
        return self.cap is not None or self.mask_ratio is not None

    @property
    def by_sequence(self) -> bool:
        return "sequence" in (self.level, self.mask_level)

    def weights(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """Return the factor of each sampled token in the policy's loss [B, T]. Without options it is the mask."""
        weights = batch.mask.clone()
        if self.cap is not None:
            weights = weights * ratios(old_logprobs_BT, batch, self.level).clamp(max=self.cap)
        return weights * (1.0 - self.masked(old_logprobs_BT, batch))

    def truncated(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """Return a mask [B, T] of the sampled tokens whose importance ratio the cap truncates."""
        if self.cap is None:
            return torch.zeros_like(batch.mask)
        return (ratios(old_logprobs_BT, batch, self.level) > self.cap) * batch.mask

    def masked(self, old_logprobs_BT: Tensor, batch: TokenBatch) -> Tensor:
        """Return a mask [B, T] of the sampled tokens that ``mask_ratio`` removes from the policy's loss."""
        if self.mask_ratio is None:
            return torch.zeros_like(batch.mask)
        found = ratios(old_logprobs_BT, batch, self.mask_level)
        return ((found < self.mask_ratio[0]) | (found > self.mask_ratio[1])) * batch.mask


def ratios(old_logprobs_BT: Tensor, batch: TokenBatch, level: Level = "token") -> Tensor:
    """Return the importance ratio pi_old / pi_sampler of each sampled token [B, T], 0 where the mask is 0. At level
    sequence, every token of a row has the row's geometric mean. The log-ratio is clamped to +-20."""
    if level == "token":
        return importance_ratio(old_logprobs_BT, batch.sampler_logprobs) * batch.mask
    gaps = (old_logprobs_BT - batch.sampler_logprobs) * batch.mask
    mean = gaps.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1.0)
    return importance_ratio(mean, torch.zeros_like(mean)) * batch.mask
