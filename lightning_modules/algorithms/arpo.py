"""ARPO, agentic reinforced policy optimisation (Dong et al.; arXiv 2507.19849; docs/algorithms/arpo.md)."""

from __future__ import annotations

from typing import Literal

from lightning_modules.advantage_transforms.attribution import HardAttribution
from lightning_modules.advantage_transforms.base import AdvantageTransform, validate_choice
from lightning_modules.algorithms.grpo import GRPO

Attribution = Literal["soft", "hard"]


def attributed(attribution: Attribution) -> list[AdvantageTransform]:
    """Return the advantage transforms for ``attribution``, which is soft (none) or hard. Raises ValueError if it is
    unknown."""
    return [HardAttribution()] if validate_choice("attribution", attribution, Attribution) == "hard" else []


class ARPO(GRPO):
    """GRPO on groups whose trajectories may branch from each other.

    The sampler (``data.rollouts.sampler``) implements ARPO: part of a group starts from the prompt, the rest branches
    off after tool results. All of them are one group. Without branches this is GRPO, bit for bit.

    ``attribution`` sets the advantage of a token that several trajectories share. ``soft``: each copy has its
    trajectory's advantage, as in plain GRPO (the paper's results and the released code). ``hard``: each copy has the
    mean over the trajectories that share the token, see ``HardAttribution``.

    The defaults of ``GRPO`` are the released ones: clip 0.2 on both sides, dual clip 3, token mean, std, no KL (its
    weight was 0, so no reference is loaded).

    Args:
        policy: Hugging Face folder to start from.
        attribution: soft or hard, see above.
    """

    def __init__(self, policy: str, attribution: Attribution = "soft", **kwargs) -> None:
        super().__init__(policy=policy, advantage_transforms=attributed(attribution), **kwargs)
