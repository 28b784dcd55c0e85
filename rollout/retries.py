"""How long to wait before trying again."""

from __future__ import annotations

import random

_DRAWS = random.Random()  # of its own: a pause must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Seconds before retry number ``retry`` (from 1): ``base_s * 2**(retry - 1)``, times a random factor between 0.5
    and 1.5 so that many callers of a service that was down do not come back at once."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)
