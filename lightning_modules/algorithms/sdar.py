"""SDAR, gated self-distillation from skills (arXiv 2605.15155; docs/algorithms/sdar.md), Skill-SD and RLSD."""

from __future__ import annotations

from common.ranges import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt, UnitInterval
from common.schedules import Coefficient
from lightning_modules.advantage_transforms.skill_signals import (
    Gate,
    GatedSkills,
    Signal,
    SkillImportanceKL,
    SkillShares,
)
from lightning_modules.advantage_transforms.skill_teacher import TeacherWeights
from lightning_modules.advantage_transforms.turns import TurnAdvantages
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.maths.turn_advantages import Statistics
from rollout.skills.injection import Skills


class SDAR(GRPO):
    """GRPO by turn (EpisodeGRPO) plus a gated loss from a self-teacher with skills (advice texts) in its prompt, see
    ``GatedSkills``.

    SDAR as published: skills_coef 0.01, beta 5, gate gap, the other defaults; in the settings of GRPO clip 0.2, kl_coef
    0.01 (search: 0.001), entropy_coef 0.001. Off, and not published: ``centred``, ``clip_signal``, ``gap_clamp``.

    Args:
        policy: Hugging Face folder to start from.
        gate: gap, entropy, soft_or, or none (1).
        beta: sharpness of the gate.
        signal: gate, reverse_kl, forward_kl or jsd.
        jsd_beta: the teacher's share of the JSD's mixture, between 0 and 1.
        centred: subtract the gate's mean over the iteration's batch, which removes the common push.
        gap_clamp: bound on |Delta| in nats; null for none.
        clip_signal: apply the importance ratio and clip (``clip_low``, ``clip_high``) to this loss, too.
        skills: skills of the teacher's prompt, and how they are selected.
        teacher_weights: current (the policy as it is at the start of the iteration: as published), ema (their moving
            average) or fixed (the initial policy).
        ema_decay: of the moving average, per iteration.
        skills_coef: weight of the loss; with 0 no teacher runs, and this is EpisodeGRPO.
        group_statistics: mean and std over rows or trajectories of a group, see ``TurnAdvantages``.
        invalid_coef: penalty of a turn for an invalid action, in units of the reward.
    """

    def __init__(
        self,
        policy: str,
        gate: Gate = "gap",
        beta: NonNegativeFloat = 5.0,
        signal: Signal = "gate",
        jsd_beta: UnitInterval = 0.5,
        centred: bool = False,
        gap_clamp: PositiveFloat | None = None,
        clip_signal: bool = False,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: Coefficient = 0.01,
        group_statistics: Statistics = "rows",
        invalid_coef: NonNegativeFloat = 0.0,
        **kwargs,
    ) -> None:
        teacher = (skills, teacher_weights, ema_decay, skills_coef)
        gated = GatedSkills(*teacher, gate, beta, signal, jsd_beta, centred, gap_clamp, clip_signal)
        super().__init__(policy, advantage_transforms=[TurnAdvantages(group_statistics, invalid_coef), gated], **kwargs)
        self.save_hyperparameters({"skills": repr(skills)})  # checkpoints hold plain types only


class SkillSD(GRPO):
    """GRPO by turn (EpisodeGRPO) plus a KL to a self-teacher with skills (advice texts) in its prompt, see
    ``SkillImportanceKL``. Published ``skills_coef``: 0.001.

    Args:
        policy: Hugging Face folder to start from.
        skills: see ``SDAR``, as the next two.
        teacher_weights: current, ema or fixed.
        ema_decay: of the moving average, per iteration.
        skills_coef: weight of the loss; with 0 no teacher runs, and this is EpisodeGRPO.
        group_statistics: mean and std over rows or trajectories of a group, see ``TurnAdvantages``.
        invalid_coef: penalty of a turn for an invalid action, in units of the reward.
    """

    def __init__(
        self,
        policy: str,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: Coefficient = 0.001,
        group_statistics: Statistics = "rows",
        invalid_coef: NonNegativeFloat = 0.0,
        **kwargs,
    ) -> None:
        loss = SkillImportanceKL(skills, teacher_weights, ema_decay, skills_coef)
        super().__init__(policy, advantage_transforms=[TurnAdvantages(group_statistics, invalid_coef), loss], **kwargs)
        self.save_hyperparameters({"skills": repr(skills)})  # checkpoints hold plain types only


class RLSD(GRPO):
    """GRPO by turn (EpisodeGRPO) in which a self-teacher with skills (advice texts) redistributes the advantage among a
    turn's tokens, see ``SkillShares``.

    Args:
        policy: Hugging Face folder to start from.
        decay_iterations: iterations over which ``skills_coef`` falls to 0.
        rlsd_clip: how far from 1 a token's factor may be (published script: 0.2).
        skills: see ``SDAR``, as the next two.
        teacher_weights: current, ema or fixed.
        ema_decay: of the moving average, per iteration.
        skills_coef: share of an advantage that the teacher distributes (lambda) at the start; published 0.5.
        group_statistics: mean and std over rows or trajectories of a group, see ``TurnAdvantages``.
        invalid_coef: penalty of a turn for an invalid action, in units of the reward.
    """

    def __init__(
        self,
        policy: str,
        decay_iterations: PositiveInt = 100,
        rlsd_clip: UnitInterval = 0.2,
        skills: Skills | None = None,
        teacher_weights: TeacherWeights = "current",
        ema_decay: OpenUnitInterval = 0.99,
        skills_coef: UnitInterval = 0.5,
        group_statistics: Statistics = "rows",
        invalid_coef: NonNegativeFloat = 0.0,
        **kwargs,
    ) -> None:
        shares = SkillShares(skills, teacher_weights, ema_decay, skills_coef, decay_iterations, rlsd_clip)
        super().__init__(
            policy, advantage_transforms=[TurnAdvantages(group_statistics, invalid_coef), shares], **kwargs
        )
        self.save_hyperparameters({"skills": repr(skills)})  # checkpoints hold plain types only
