"""OPSD, on-policy self-distillation: the initial policy with a privileged prompt teaches (docs/algorithms/sod.md)."""

from __future__ import annotations

from common.ranges import PositiveFloat
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.distillation import Distillation
from lightning_modules.advantage_transforms.teacher_prompts import Privilege, PrivilegedPrompts
from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.algorithms.sod import Mode, mode_weights


class OPSD(GRPO):
    """On-policy self-distillation: the teacher is the frozen initial policy, with the answer or a hint in its prompt.
    The signal is that of SOD.

    The teacher scores the response that the student sampled; only the prompt before it differs.

    The paper's baselines OPSD_gt and OPSD_hint are ``privilege: answer`` and ``hint``; their prompts are not published,
    so the texts are ours. Released OPSD matches whole distributions (full-vocabulary JSD); here, as in SOD, the sampled
    tokens' log-ratio is the signal, uniform by default.

    Args:
        policy: Hugging Face folder to start from, and of the teacher.
        privilege: what the teacher is told: answer (the task's first golden answer) or hint (``metadata["hint"]``).
        template: the teacher's question: a text with {question} and {answer} or {hint}; null for one of ours.
        opd_mode: weights of the signal by turn, see ``SOD``; for other options of a mode, or several weights, take
            ``GRPO`` with a ``Distillation`` whose prompts are ``PrivilegedPrompts``.
        opd_coef: weight of the distillation signal beside the group advantage; 0: no teacher is loaded.
        adv_clamp: bound on |T - S| of a token in the advantage; null for none.
    """

    def __init__(
        self,
        policy: str,
        privilege: Privilege = "answer",
        template: str | None = None,
        opd_mode: Mode = "uniform",
        opd_coef: Coefficient = 1.0,
        adv_clamp: PositiveFloat | None = None,
        **kwargs,
    ) -> None:
        prompts, weights = PrivilegedPrompts(privilege, template), mode_weights(opd_mode, {})
        distils = opd_mode != "none" and not is_zero(opd_coef)
        if not distils and adv_clamp is not None:
            raise ValueError(f"adv_clamp: no effect with opd_coef {opd_coef} and opd_mode {opd_mode}")
        signal = [Distillation(policy, None, prompts, weights, opd_coef, adv_clamp)] if distils else []
        super().__init__(policy=policy, advantage_transforms=[*signal], **kwargs)
