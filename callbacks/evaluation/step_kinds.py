"""Classifies trajectories by the weights and outcomes of their steps: stable, erroneous, recovering. Pure.

The names are the paper's (SOD, arXiv 2605.07725, its cases A, B and C), which defines none of them: weights react to
divergence alone (docs/papers/sod.md 1.2). The definitions below are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from callbacks.evaluation.step_rows import ERRONEOUS, StepRow


class Kind(StrEnum):
    STABLE = "stable"
    ERRONEOUS = "erroneous"
    RECOVERING = "recovering"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which weights are low, and which are back up. The weight of the first step is 1 by definition.

    Raises:
        ValueError: not 0 < low <= recovered, without which a trajectory could be of two kinds.
    """

    low: float = 0.7  # a weight below it is low
    recovered: float = 0.9  # a weight of at least that has risen back

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.recovered:
            raise ValueError(f"{self}: expected 0 < low <= recovered")


def kind_of(trajectory: Sequence[StepRow], bounds: Bounds = Bounds()) -> Kind:
    """The kind of one trajectory, from all its steps 1..K in order. A step is erroneous if its outcome is error,
    timeout, refused or invalid.

    - stable: K >= 2, no step is erroneous, and no weight is low;
    - erroneous: some step e < K is erroneous, and the weights of all steps after e, the last one included, are low;
    - recovering: some weight is low; with l the last step whose weight is, some step at l or before is erroneous, no
      step after l is, and the last weight has risen back (w_K >= recovered; so l < K);
    - other: everything else, such as a single step, weights that sink without an error, errors that leave no trace.
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
    trajectories: Sequence[Sequence[StepRow]], bounds: Bounds = Bounds()
) -> dict[Kind, list[Sequence[StepRow]]]:
    """All kinds, those without a trajectory too."""
    kinds: dict[Kind, list[Sequence[StepRow]]] = {kind: [] for kind in Kind}
    for trajectory in trajectories:
        kinds[kind_of(trajectory, bounds)].append(trajectory)
    return kinds
