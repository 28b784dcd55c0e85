"""AEPO, agentic entropy-balanced policy optimisation (arXiv 2510.14545; docs/algorithms/arpo.md)."""

from __future__ import annotations

from common.ranges import FiniteFloat
from lightning_modules.advantage_transforms.attribution import EntropyScaling
from lightning_modules.algorithms.arpo import Attribution, attributed
from lightning_modules.algorithms.grpo import GRPO


class AEPO(GRPO):
    """ARPO with larger advantages for tokens where the policy is uncertain. The sampler implements the rollout half
    of the method::

        A~_t = A_t (1 + entropy_weight z_t)        z: entropy of pi_old at t, standardised, see ``EntropyScaling``
        clip_balanced: a token above 1 + clip_high with A > 0 keeps the gradient factor 1 + clip_high, not 0

    ``train/clip_fraction`` counts the tokens that the ordinary clip would drop.

    Args:
        policy: Hugging Face folder to start from.
        clip_balanced: whether the clip keeps a gradient above its range; false for the ordinary one.
        entropy_weight: a, how strongly entropy scales an advantage; 0 for not at all.
        attribution: soft or hard, see ``ARPO``.
    """

    def __init__(
        self,
        policy: str,
        clip_balanced: bool = True,
        entropy_weight: FiniteFloat = 0.2,
        attribution: Attribution = "soft",
        **kwargs,
    ) -> None:
        scaling = [EntropyScaling(entropy_weight)] if entropy_weight else []
        transforms = [*attributed(attribution), *scaling]
        super().__init__(policy=policy, clip_balanced=clip_balanced, advantage_transforms=transforms, **kwargs)
