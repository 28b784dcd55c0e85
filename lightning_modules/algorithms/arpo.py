"""ARPO, agentic reinforced policy optimisation (Dong et al.; arXiv 2507.19849; docs/papers/arpo.md)."""

from __future__ import annotations

from typing import Literal

from lightning_modules.algorithms.grpo import GRPO
from lightning_modules.annotations.attribution import HardAttribution
from lightning_modules.annotations.base import Annotation

Attribution = Literal["soft", "hard"]


def attributed(attribution: Attribution) -> list[Annotation]:
    """The annotations of an attribution. Raises ValueError if it is unknown."""
    if attribution not in ("soft", "hard"):
        raise ValueError(f"attribution is {attribution!r}; expected soft or hard")
    return [HardAttribution()] if attribution == "hard" else []


class ARPO(GRPO):
    """GRPO on groups whose members may be branches of each other.

    What makes ARPO is the sampler (``data.rollouts.sampler``): part of a group starts from the prompt, the rest
    branches off after tool results. All of them are one group. Without branches this is GRPO, number for number.

    ``attribution`` says what a token is worth that several trajectories have in common. ``soft``: each copy has its
    trajectory's advantage, as in plain GRPO (the paper's results, and all that was released). ``hard``: each copy has
    the mean over those that share it, see ``HardAttribution``.

    The other defaults of ``GRPO`` are the released ones: clip 0.2 on both sides, dual clip 3, token mean, std, no KL
    (its weight was 0, so the reference is not even loaded).

    Args:
        policy: Hugging Face folder to start from.
        attribution: soft or hard, see above.
    """

    def __init__(self, policy: str, attribution: Attribution = "soft", **kwargs) -> None:
        super().__init__(policy=policy, annotations=attributed(attribution), **kwargs)
