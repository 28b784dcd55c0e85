"""Classifies trajectories by the weights and outcomes of their turns: stable, erroneous, recovering.

The paper names these kinds (SOD, arXiv 2605.07725, cases A, B and C) without defining them. These definitions are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from callbacks.evaluation.turn_scores import ERRONEOUS, TurnScore


class Kind(StrEnum):
    STABLE = "stable"
    ERRONEOUS = "erroneous"
    RECOVERING = "recovering"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds below which a turn's weight (SOD) is low, and from which on it has recovered. The weight of the first
    turn is 1 by definition.

    Raises:
        ValueError: not 0 < low <= recovered; a trajectory could then be of two kinds.
    """

    low: float = 0.7  # a weight below it is low
    recovered: float = 0.9  # a weight of at least this has recovered

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.recovered:
            raise ValueError(f"{self}: expected 0 < low <= recovered")


def kind_of(trajectory: Sequence[TurnScore], bounds: Bounds = Bounds()) -> Kind:
    """Classify a trajectory as stable, erroneous, recovering or other, from the scores of all its turns 1..K in order.

    A turn is erroneous if its outcome is error, timeout, refused or invalid.

    - stable: K >= 2, no turn is erroneous, and no weight is low;
    - erroneous: some turn e < K is erroneous, and the weights of all turns after e are low;
    - recovering: some weight is low, some turn at or before the last low weight is erroneous, no later turn is, and the
      last weight has recovered;
    - other: the rest, such as a single turn, weights that sink without an error, or errors without a trace.
    """
    count = len(trajectory)
    wrong = [k for k, row in enumerate(trajectory) if row.outcome in ERRONEOUS]
    low = [k for k, row in enumerate(trajectory) if row.weight < bounds.low]
    if not wrong and not low:
        return Kind.STABLE if count >= 2 else Kind.OTHER
    followed = [k for k in wrong if k < count - 1]
    if followed and all(k in low for k in range(followed[-1] + 1, count)):  # if for any error, then for the last
        return Kind.ERRONEOUS
    if low and wrong and wrong[-1] <= low[-1] and trajectory[-1].weight >= bounds.recovered:
        return Kind.RECOVERING
    return Kind.OTHER


def sort_by_kind(
    trajectories: Sequence[Sequence[TurnScore]], bounds: Bounds = Bounds()
) -> dict[Kind, list[Sequence[TurnScore]]]:
    """Group trajectories by kind (stable, erroneous, ...). Every kind has a list, which may be empty."""
    kinds: dict[Kind, list[Sequence[TurnScore]]] = {kind: [] for kind in Kind}
    for trajectory in trajectories:
        kinds[kind_of(trajectory, bounds)].append(trajectory)
    return kinds
