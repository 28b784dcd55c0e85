"""DGPO, distillation-guided policy optimisation (Kotoge, Nishimura, Ma; arXiv 2508.20324; specs/dgpo.md 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_modules.divergences import Estimator
from lightning_modules.ppo import PPO

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory


class DGPO(PPO):
    """PPO whose reference is the teacher, and whose KL is paid by wrong trajectories only (eq. 4)::

        r_t = [t last] EM(y)  -  kl_coef * k_t * m_t * w        k_t = log pi_old(y_t | h_t) - log pi_T(y_t | h_t)
        w   = 1 if EM(y) < correct_from else 0

    The KL is student || teacher on the sampled tokens (k1), a token reward inside GAE: no gradient flows through it,
    and it stays fixed during the update.  Source: the authors' ray_trainer.py:92-134; the project page prints the
    opposite order, the code decides.  A trajectory is right by its reward part ``em`` (its total, if it has none).

    The paper's ablations are ``selective: false`` (uniform KL), ``kl_coef: 0`` (no teacher), ``kl_in: loss``.

    Args:
        policy: Hugging Face folder of the cold-started student; the critic starts from its body too.
        teacher: Hugging Face folder of the frozen teacher; it must share the student's tokenizer.
        kl_coef: beta, weight of the KL.
        kl_in: whether the KL is a token reward (the paper) or a loss term (then ``kl_estimator`` k2 or k3).
        selective: whether only wrong trajectories pay the KL.
        kl_estimator: k1 (the paper), k2 or k3.
        correct_from: exact-match score from which a trajectory counts as right.
    """

    def __init__(
        self,
        policy: str,
        teacher: str,
        kl_coef: float = 0.001,
        kl_in: Literal["reward", "loss"] = "reward",
        selective: bool = True,
        kl_estimator: Estimator = "k1",
        correct_from: float = 0.1,
        **kwargs,
    ) -> None:
        super().__init__(
            policy=policy, reference=teacher, kl_coef=kl_coef, kl_in=kl_in, kl_estimator=kl_estimator, **kwargs
        )
        self.selective, self.correct_from = selective, correct_from

    def kl_rows(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """w [B]: 1 for wrong trajectories, 0 for right ones (the fork's ``create_reward_based_mask``)."""
        if not self.selective:
            return [1.0] * len(trajectories)
        rewards = [t.reward for t in trajectories if t.reward is not None]
        return [float(r.parts.get("em", r.total) < self.correct_from) for r in rewards]
