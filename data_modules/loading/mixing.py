"""Chooses the source of each distillation batch: fixed trajectories, fresh ones of the student, or kept ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from common.ranges import NonNegativeFloat, PositiveInt, UnitInterval

Source = Literal["fixed", "fresh", "kept"]


class Mixing(ABC):
    """Chooses where each distillation batch comes from: saved, newly sampled ("fresh") or kept trajectories of the
    student. The choice is the same on every rank.

    ``capacity``: how many of the student's latest trajectories are kept. ``follows``: the held-out loss that
    ``validated`` receives, such as "ce", or None for no loss.
    """

    capacity: int = 0
    follows: str | None = None

    @abstractmethod
    def source(self, draw: float, step: int, total: float, kept: int) -> Source:
        """Return the source of the batch at ``step`` (1 to ``total``): "fixed", "fresh" or "kept" trajectories.

        ``draw`` is uniform in [0, 1); ``kept`` counts the kept trajectories: "kept" needs at least one.
        """

    def validated(self, loss: float) -> None:
        """Adapt the mixing to ``loss``, the loss on held-out trajectories that the attribute ``follows`` names. Called
        before the first optimiser step and at every validation. The default does nothing."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return the values to log at every step, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None


class OnPolicyShare(Mixing):
    """Replaces a batch by the student's own trajectories with probability ``share``. This is GKD's lambda (arXiv
    2306.13649; ``lmbda`` of trl's GKDTrainer): 1 is on-policy distillation, 0 the fixed data.
    """

    def __init__(self, share: UnitInterval = 0.5) -> None:
        self.share = share

    def source(self, draw: float, step: int, total: float, kept: int) -> Source:
        return "fresh" if draw < self.share else "fixed"


class AdaptiveOffPolicy(Mixing):
    """Chooses between saved, fresh and kept trajectories by DistiLLM's adaptive off-policy sampling (arXiv 2402.03898;
    jongwooko/distillm, finetune.py and buffer.py).

    ``phi`` is the share of the student's trajectories, fresh or kept. A batch is fresh if the draw is below
    ``phi (1 - step / total)``, or below ``phi`` while fewer than ``capacity`` are kept. It is kept (drawn without
    replacement from the latest ``capacity``) if the draw is below ``phi``, else fixed. ``phi`` starts at ``start`` and
    rises by ``increase`` at a validation whose cross-entropy on held-out trajectories is at least ``tolerance`` above
    that of the last rise (at first: before training).

    Args:
        capacity: trajectories kept (arguments.py: 1000).
        start: phi at the beginning.
        increase: of phi, at most to 1.
        tolerance: nats (``loss_eps``: 0.1; SakanaAI/TAID's form has 0).
    """

    follows = "ce"

    def __init__(
        self,
        capacity: PositiveInt = 1000,
        start: UnitInterval = 0.0,
        increase: UnitInterval = 0.1,
        tolerance: NonNegativeFloat = 0.1,
    ) -> None:
        self.capacity, self.increase, self.tolerance = capacity, increase, tolerance
        self.phi = start
        self.reference: float | None = None

    def source(self, draw: float, step: int, total: float, kept: int) -> Source:
        if draw < self.phi * (1 - step / total) or (draw < self.phi and kept < self.capacity):
            return "fresh"
        return "kept" if draw < self.phi else "fixed"

    def validated(self, loss: float) -> None:
        if self.reference is None:
            self.reference = loss
        elif loss >= self.reference + self.tolerance:
            self.phi, self.reference = min(1.0, self.phi + self.increase), loss

    def metrics(self) -> dict[str, float]:
        return {"data/phi": self.phi}

    def state_dict(self) -> dict[str, Any]:
        return {"phi": self.phi, "reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phi, self.reference = state["phi"], state["reference"]
