"""Learning-rate factors by iteration (0, 1, ...), for torch's LambdaLR."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

ScheduleName = Literal["constant", "cosine"]


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
