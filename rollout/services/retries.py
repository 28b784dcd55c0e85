"""Retries with exponential backoff and jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout.trajectory import InfrastructureError, PermanentFailure

Result = TypeVar("Result")

_DRAWS = random.Random()  # a separate generator: pauses must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Return seconds before retry number ``retry`` (from 1): ``base_s * 2**(retry - 1)``, times a random factor between
    0.5 and 1.5, so that many callers do not return to a service at the same moment."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)


async def with_retries(attempt: Callable[[], Awaitable[Result]], retries: int, backoff_s: float) -> Result:
    """Await ``attempt()``, and again after an InfrastructureError other than a PermanentFailure. Raises the last error.

    A loop, because tenacity takes a third of a turn's processor time for a tool call that succeeds at once, and draws
    its jitter from the global generator.

    Args:
        retries: further attempts after the first.
        backoff_s: seconds before the first retry, see ``pause_before_retry``.
    """
    for retry in range(1, retries + 1):
        try:
            return await attempt()
        except PermanentFailure:
            raise
        except InfrastructureError:
            await asyncio.sleep(pause_before_retry(retry, backoff_s))
    return await attempt()
