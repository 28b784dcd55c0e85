"""Schedules by iteration (0, 1, ...): learning-rate factors for torch's LambdaLR, and coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt

ScheduleName = Literal["constant", "cosine"]


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


def is_zero(coefficient: float | Schedule) -> bool:
    """Return whether a coefficient is 0 in every iteration."""
    return coefficient == 0 if not isinstance(coefficient, Schedule) else coefficient.start == coefficient.end == 0


def warmup_constant(warmup_steps: int) -> Callable[[int], float]:
    """Return a function from step to learning-rate factor that rises linearly from 1/warmup to 1, then stays constant.

    verl (and so DGPO as released) starts from 0, which wastes its first rollout batch; we start one notch later.
    """
    return lambda step: min(1.0, (step + 1) / max(1, warmup_steps))


def warmup_cosine(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return a function from step to learning-rate factor: a linear rise, then half a cosine from 1 down to 0 at
    ``total_steps``. The rise is that of ``warmup_constant``."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def make_schedule(name: ScheduleName, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the learning-rate schedule of a name, as a function from step to factor. Raises ValueError for an unknown
    name, or a cosine without a known number of steps."""
    if name == "constant":
        return warmup_constant(warmup_steps)
    if name == "cosine":
        if total_steps < 1:
            raise ValueError("a cosine schedule needs to know its end: set trainer.max_steps or trainer.max_epochs")
        return warmup_cosine(warmup_steps, total_steps)
    raise ValueError(f"unknown schedule '{name}'; expected constant or cosine")
