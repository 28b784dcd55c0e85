"""Credit of the outcome by token: shared tokens of branches (ARPO) and uncertain tokens (AEPO); docs/papers/arpo.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common.ranges import FiniteFloat
from lightning_modules import ranks
from lightning_modules.advantage_transforms.base import AdvantageTransform, Algorithm, RolloutBatch, per_turn_prompts
from lightning_modules.maths.advantages import Member, shared_token_advantages, whiten

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class HardAttribution(AdvantageTransform):
    """A token that d trajectories have in common by forking is worth the mean of their advantages, on each copy.

    Without this (soft attribution) each copy has its own trajectory's advantage.  While no ratio has left 1, every
    token weighs alike (``token_mean``) and all copies are learnt from in one optimiser step (``num_mini_batches:
    1``), the
    gradients add up to the same.  Otherwise they differ: where one sign of A is clipped and the other is not, and
    because each step sees other copies.
    """

    needs_outcome = needs_groups = True
    reads_old_logprobs = False

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        self._check_rows(per_turn_prompts(data))

    def _check_rows(self, by_turn: bool) -> None:
        if by_turn:
            raise ValueError(
                "HardAttribution compares whole trajectories, but their turns have prompts of their own and are rows "
                "by themselves; take window: null (one conversation), or soft attribution"
            )

    def assign_credit(self, rollout: RolloutBatch, advantages: Tensor) -> Tensor:
        trajectories = rollout.trajectories
        self._check_rows(any(t.row is not None for t in trajectories))
        members = [(t.group, t.index) for t in trajectories]
        # What failed is left out of the gradient, but a line of descent may lead through it.
        forks = forks_of([*rollout.algorithm.rolled_out, *trajectories])
        return shared_token_advantages(advantages, rollout.batch.prompt_lengths.tolist(), members, forks)


class EntropyScaling(AdvantageTransform):
    """AEPO's advantage: ``A_t (1 + weight z_t)``, z the entropy of pi_old at t, standardised over the model's tokens of
    the whole rollout batch and all ranks. The released code takes it over each micro-batch, which makes the gradient
    depend on how the batch was cut; and with its shipped entropy_coeff 0 it never computes the entropy.

    Args:
        weight: how strongly entropy scales an advantage.
    """

    needs_outcome = True

    def __init__(self, weight: FiniteFloat = 0.2) -> None:
        self.weight = weight

    def assign_credit(self, rollout: RolloutBatch, advantages: Tensor) -> Tensor:
        z = whiten(rollout.scores.require("entropy"), rollout.batch.mask, ranks.sum_over_ranks)
        return advantages * (1.0 + self.weight * z)


def forks_of(trajectories: Sequence[Trajectory]) -> dict[Member, tuple[int, int]]:
    """By (group, index) of each branch: its parent's index, and how many response tokens it took over."""
    return {(t.group, t.index): (t.fork.parent, t.fork.at) for t in trajectories if t.fork is not None}
