"""A second engine that plays some turns of the policy's trajectories (Guided-OPD, arXiv 2606.15912)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from common.schedules import Coefficient, Schedule, ends, is_zero
from common.seeds import derive_seed
from rollout.engines.base import Engine


@dataclass(frozen=True)
class Guide:
    """A teacher that plays a share of the turns while the policy trains. Its turns are marked (``Turn.guided``);
    ``GuidedTurns`` learns from them. Evaluations have no guide. Its engine starts with the first turn that it may play.

    Args:
        engine: samples the teacher's turns; it must have the policy's tokenizer.
        share: probability that a turn is the teacher's, from 0 to 1: a number, or a ``Schedule`` by iteration.
    """

    engine: Engine
    share: Coefficient

    def __post_init__(self) -> None:
        if max(ends(self.share)) > 1:
            raise ValueError(f"rollouts.guide.share is {self.share}; expected probabilities from 0 to 1")
        if is_zero(self.share):
            raise ValueError("rollouts.guide.share is 0, so that the guide never plays; leave it out, or raise it")

    def share_at(self, iteration: int) -> float:
        """Return the probability in an iteration (0, 1, ...)."""
        return self.share(iteration) if isinstance(self.share, Schedule) else self.share


def plays(share: float, seed: int, group: str, key: int | str, turn: int) -> bool:
    """Return whether the guide plays a turn. The draw depends on the arguments only."""
    return share > 0 and random.Random(derive_seed(seed, group, key, turn, "guide")).random() < share
