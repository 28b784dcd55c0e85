"""Retries of asynchronous calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.async_calls import pause_before_retry
from rollout.trajectory import InfrastructureError, PermanentFailure

T = TypeVar("T")


async def with_retries(attempt: Callable[[], Awaitable[T]], retries: int, backoff_s: float) -> T:
    """Call and await ``attempt``, and retry after an InfrastructureError other than a PermanentFailure. Returns its
    result, or raises the last error.

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
