"""DGPO, distillation-guided policy optimisation (Kotoge, Nishimura, Ma; arXiv 2508.20324; docs/algorithms/dgpo.md)."""

from __future__ import annotations

from typing import Literal

from common.ranges import FiniteFloat
from common.schedules import Coefficient, is_zero
from lightning_modules.advantage_transforms.distillation import IncorrectOnly
from lightning_modules.algorithms.ppo import PPO
from lightning_modules.maths.losses import Estimator


class DGPO(PPO):
    """PPO with the teacher as its reference and a KL for incorrect trajectories only (eq. 4)::

        r_t = [t last] EM(y)  -  kl_coef * k_t * m_t * w        k_t = log pi_old(y_t | h_t) - log pi_T(y_t | h_t)
        w   = 1 if EM(y) < success_threshold else 0

    The KL is student || teacher on the sampled tokens (k1), as a token reward inside GAE. It has no gradient and stays
    fixed during the update. Source: the authors' ray_trainer.py:92-134; the project page prints the opposite order, and
    we follow the code. A trajectory is correct by its reward part ``em`` (without one, by its total reward).

    The paper's ablations are ``selective: false`` (uniform KL), ``kl_coef: 0`` (no teacher is loaded), ``kl_in: loss``.

    Args:
        policy: Hugging Face folder of the cold-started student; the critic starts from its body too.
        teacher: Hugging Face folder of the frozen teacher; it must share the student's tokenizer.
        kl_coef: beta, weight of the KL: a number, or a ``Schedule``.
        kl_in: whether the KL is a token reward (the paper) or a loss term (then ``kl_estimator`` k2 or k3).
        selective: whether only incorrect trajectories pay the KL.
        kl_estimator: k1 (the paper), k2 or k3.
        success_threshold: smallest exact-match score of a correct trajectory.
    """

    def __init__(
        self,
        policy: str,
        teacher: str,
        kl_coef: Coefficient = 0.001,
        kl_in: Literal["reward", "loss"] = "reward",
        selective: bool = True,
        kl_estimator: Estimator = "k1",
        success_threshold: FiniteFloat = 0.1,
        **kwargs,
    ) -> None:
        if success_threshold != 0.1 and not selective:
            raise ValueError(f"success_threshold is {success_threshold}: no effect with selective false; leave it out")
        super().__init__(
            policy=policy,
            reference=teacher,
            kl_coef=kl_coef,
            kl_in=kl_in,
            kl_estimator=kl_estimator,
            kl_weights=[IncorrectOnly(success_threshold)] if selective and not is_zero(kl_coef) else None,
            **kwargs,
        )
