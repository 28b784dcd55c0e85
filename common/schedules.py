"""Coefficients that change with the iteration (0, 1, ...)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class Schedule:
    """A coefficient that changes from ``start`` to ``end`` with the iteration. It depends on the iteration only, so a
    resumed run goes on with the same values::

        coef: {start: 1.0, end: 0.0, iterations: 50}

    Args:
        start: value of the first iterations, up to number ``after``.
        end: value from iteration ``after + iterations`` on.
        iterations: from the start value to the end value.
        after: iterations with the start value (0: the first iteration has it).
        shape: linear, or cosine (half a wave: slow at both ends).
    """

    start: NonNegativeFloat
    end: NonNegativeFloat
    iterations: PositiveInt
    after: NonNegativeInt = 0
    shape: Literal["linear", "cosine"] = "linear"

    def __call__(self, iteration: int) -> float:
        """Return the value of an iteration (0, 1, ...)."""
        done = min(1.0, max(0.0, (iteration - self.after) / self.iterations))
        if self.shape == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.start + (self.end - self.start) * done


Coefficient = NonNegativeFloat | Schedule  # of an option: a number, or a schedule


def ends(coefficient: float | Schedule) -> tuple[float, float]:
    """Return a coefficient's first and last value; all others lie between them."""
    return (coefficient.start, coefficient.end) if isinstance(coefficient, Schedule) else (coefficient, coefficient)


def is_zero(coefficient: float | Schedule) -> bool:
    """Return whether a coefficient is 0 in every iteration."""
    return ends(coefficient) == (0, 0)
