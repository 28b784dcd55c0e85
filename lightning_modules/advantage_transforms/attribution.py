"""Credit assignment by token: shared tokens of branches (ARPO) and uncertain tokens (AEPO); docs/algorithms/arpo.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common import ranks
from common.ranges import FiniteFloat
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.base import (
    AdvantageTransform,
    Algorithm,
    RolloutBatch,
    current,
    per_turn_prompts,
    plays_programs,
)
from lightning_modules.maths.advantages import Member, shared_token_advantages, whiten

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class HardAttribution(AdvantageTransform):
    """Gives each token that several branches share the mean of these branches' advantages, on every copy (ARPO's hard
    attribution).

    Without this (soft attribution) each copy has its own trajectory's advantage. Both have the same gradient while all
    ratios are 1, every token weighs the same (``token_mean``) and one optimiser step sees all copies
    (``num_mini_batches: 1``). Otherwise they differ, because the clip acts on one sign of A only, and because each step
    sees other copies.
    """

    needs_outcome = needs_groups = True
    reads_old_logprobs = False

    def check_data(self, algorithm: Algorithm, data: Any) -> None:
        if plays_programs(data):
            raise ValueError(
                "HardAttribution shares tokens among branches, which a program does not have; leave it out"
            )
        self._check_rows(per_turn_prompts(data))

    def _check_rows(self, by_turn: bool) -> None:
        if by_turn:
            raise ValueError(
                "HardAttribution compares whole trajectories, but every turn has its own prompt and is a row; take "
                "window: null (one conversation), or soft attribution"
            )

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        trajectories = batch.trajectories
        self._check_rows(any(t.row is not None for t in trajectories))
        members = [(t.group, t.index) for t in trajectories]
        # Failed trajectories have no gradient, but branches may descend through them.
        forks = forks_of([*batch.algorithm.rolled_out, *trajectories])
        return shared_token_advantages(advantages, batch.tokens.prompt_lengths.tolist(), members, forks)


class EntropyScaling(AdvantageTransform):
    """Scales the advantage of each token by the policy's entropy there: ``A_t (1 + weight z_t)`` (AEPO).

    z is the entropy of pi_old at t, standardised over the model's tokens of the whole rollout batch and all ranks. The
    released code standardises over each micro-batch, so its gradient depends on the split; with its shipped
    entropy_coeff 0 it never computes the entropy.

    Args:
        weight: how strongly entropy scales an advantage.
    """

    needs_outcome = True

    def __init__(self, weight: FiniteFloat = 0.2) -> None:
        self.weight = weight

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        z = whiten(batch.scores.require("entropy"), batch.tokens.mask, ranks.sum_over_ranks)
        return advantages * (1.0 + self.weight * z)


class OutcomeScale(AdvantageTransform):
    """Multiplies the outcome's advantages by a coefficient, for example one that rises while a teacher's falls (ATOD).
    Signals of other transforms are added afterwards.

    Logged: ``train/outcome_scale``.

    Args:
        coef: a number, or a ``Schedule``.
    """

    needs_outcome = True
    reads_old_logprobs = False

    def __init__(self, coef: Coefficient) -> None:
        if is_zero(coef):
            raise ValueError("coef is 0, so that rewards have no effect; take use_grpo: false")
        self.coef = coef

    def assign_credit(self, batch: RolloutBatch, advantages: Tensor) -> Tensor:
        coef = current(batch.algorithm, self.coef)
        batch.algorithm.metrics.maximum("train/outcome_scale", coef)
        return coef * advantages


def forks_of(trajectories: Sequence[Trajectory]) -> dict[Member, tuple[int, int]]:
    """Return the origin of each branched trajectory, as {(group, index): (parent's index, number of copied response
    tokens)}."""
    return {(t.group, t.index): (t.fork.parent, t.fork.at) for t in trajectories if t.fork is not None}
