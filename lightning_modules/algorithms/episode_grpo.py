"""EpisodeGRPO and GiGPO: GRPO as verl-agent runs it on episodes, with advantages by turn (docs/algorithms/grpo.md)."""

from __future__ import annotations

from common.ranges import NonNegativeFloat, UnitInterval
from lightning_modules.advantage_transforms.turns import StateAdvantages, TurnAdvantages
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.maths.turn_advantages import Statistics, TurnNorm


class EpisodeGRPO(GRPO):
    """GRPO with one advantage per turn instead of one per trajectory, see ``TurnAdvantages``.

    Args:
        policy: Hugging Face folder to start from.
        group_statistics: mean and std over rows or trajectories of a group, see ``TurnAdvantages``.
        invalid_coef: penalty of a turn for an invalid action, in units of the reward.
    """

    def __init__(
        self, policy: str, group_statistics: Statistics = "rows", invalid_coef: NonNegativeFloat = 0.0, **kwargs
    ) -> None:
        super().__init__(policy=policy, advantage_transforms=[TurnAdvantages(group_statistics, invalid_coef)], **kwargs)


class GiGPO(GRPO):
    """GRPO with one advantage per turn that also compares turns from the same state, see ``StateAdvantages``.

    Args:
        policy: Hugging Face folder to start from.
        group_statistics: mean and std over rows or trajectories of a group, see ``TurnAdvantages``.
        invalid_coef: penalty of a turn for an invalid action, in units of the reward.
        turn_weight: weight of the comparison by state (published: 1).
        gamma: discount per turn of later rewards (published: 0.95).
        turn_norm: mean_norm (no std) or mean_std_norm; also applies to the episode's advantage.
        similarity: difflib ratio from which two states count as equal, see ``StateAdvantages``; 1 for equal texts.
    """

    def __init__(
        self,
        policy: str,
        group_statistics: Statistics = "rows",
        invalid_coef: NonNegativeFloat = 0.0,
        turn_weight: NonNegativeFloat = 1.0,
        gamma: UnitInterval = 0.95,
        turn_norm: TurnNorm = "mean_norm",
        similarity: UnitInterval = 1.0,
        **kwargs,
    ) -> None:
        turns = StateAdvantages(group_statistics, invalid_coef, turn_weight, gamma, turn_norm, similarity)
        super().__init__(policy=policy, advantage_transforms=[turns], **kwargs)
