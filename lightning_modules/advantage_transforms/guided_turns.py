"""Guided-OPD: turns that a teacher plays in the policy's trajectories are imitated (arXiv 2606.15912)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.ranges import PositiveFloat
from common.schedules import is_zero
from lightning_modules.advantage_transforms.base import AdvantageTransform, Algorithm, MicroBatch, RolloutBatch
from lightning_modules.batch import RowTensors, TokenBatch
from lightning_modules.maths.correction import Correction
from lightning_modules.maths.losses import masked_sum

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class GuidedInputs(RowTensors):
    guided: Tensor  # [B, T] float32, 1 for tokens that the rollouts' guide sampled


class GuidedTurns(AdvantageTransform):
    """Imitates the turns that the rollouts' guide has played: cross-entropy on their tokens. Advantages, ratios and the
    other transforms concern the policy's tokens. The policy loss and the cross-entropy share one divisor, the tokens of
    all turns (``aggregation``), so the guide's share weighs them. With ``Distillation`` and ``use_grpo: false`` this is
    Guided-OPD.

    Put it last in the list. Logged: ``train/guided_tokens`` (share of the sampled tokens), ``train/loss_guided`` (mean
    cross-entropy of these, nats). ``train/reward`` and the like are those of trajectories that both have played.

    Args:
        coef: weight of the cross-entropy.
    """

    learns = True
    reads_old_logprobs = False

    def __init__(self, coef: PositiveFloat = 1.0) -> None:
        self.coef = coef

    def check(self, algorithm: Algorithm) -> None:
        if algorithm.advantage_transforms[-1] is not self:
            raise ValueError("advantage_transforms: GuidedTurns must be the last, because it takes signals away")
        unfit = {
            "a critic": getattr(algorithm, "critic_path", None) is not None,
            "kl_coef": not is_zero(getattr(algorithm, "kl_coef", 0.0)),
            "entropy_coef": not is_zero(getattr(algorithm, "entropy_coef", 0.0)),
            "ratio_denominator: sampler": getattr(algorithm, "ratio_denominator", None) == "sampler",
            "importance_level or mask_level: sequence": getattr(algorithm, "correction", Correction()).by_sequence,
        }
        unfit |= {
            type(other).__name__: other.adds_loss for other in algorithm.advantage_transforms if other is not self
        }
        if names := [name for name, given in unfit.items() if given]:
            raise ValueError(
                f"GuidedTurns and {', '.join(names)}: these would also concern the guide's tokens, which the policy "
                "has not sampled; leave them out"
            )

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        rollouts = getattr(data, "rollouts", None)
        if rollouts is not None and getattr(rollouts, "guide", None) is None:
            raise ValueError("GuidedTurns imitates turns of rollouts.guide, but there is none; give the rollouts one")

    def transform(self, batch: RolloutBatch, advantages: Tensor) -> tuple[Tensor, RowTensors | None]:
        guided = guided_tokens(batch.trajectories, batch.tokens)
        batch.algorithm.metrics.mean("train/guided_tokens", guided.sum(), guided.sum() + batch.tokens.mask.sum())
        return advantages * (1.0 - guided), GuidedInputs(guided)

    def loss(self, micro: MicroBatch, inputs: RowTensors | None) -> Tensor | None:
        if not isinstance(inputs, GuidedInputs):
            return None
        logprobs = micro.outputs.logprobs
        total, count = masked_sum(-logprobs.detach(), inputs.guided)
        micro.algorithm.metrics.mean("train/loss_guided", total, count)
        return self.coef * masked_sum(-logprobs, inputs.guided * micro.weights.aggregation)[0]


def guided_tokens(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor:
    """Return a mask [B, T] float32 of the tokens that the rollouts' guide sampled."""
    found = torch.zeros(batch.mask.shape)
    for row, t in enumerate(trajectories):
        for turn in t.turns:
            if turn.guided:
                start = len(t.prompt_ids)
                found[row, start + turn.start : start + turn.end] = 1.0
    return found.to(batch.mask.device)


def of_policy(trajectories: Sequence[Trajectory], batch: TokenBatch) -> TokenBatch:
    """Return the batch with a mask of the tokens that the policy itself has sampled."""
    if not any(turn.guided for t in trajectories for turn in t.turns):
        return batch
    return dataclasses.replace(batch, mask=batch.mask * (1.0 - guided_tokens(trajectories, batch)))
