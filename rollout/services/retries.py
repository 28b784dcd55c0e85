"""Retries with exponential backoff and jitter."""

from __future__ import annotations

import random
from collections.abc import Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from rollout.trajectory import InfrastructureError, PermanentFailure

_DRAWS = random.Random()  # of its own: a pause must not move the seeded generators of a run


def pause_before_retry(retry: int, base_s: float) -> float:
    """Seconds before retry number ``retry`` (from 1): ``base_s * 2**(retry - 1)``, times a random factor between 0.5
    and 1.5 so that many callers of a service that was down do not come back at once."""
    return base_s * 2 ** (retry - 1) * _DRAWS.uniform(0.5, 1.5)


def may_heal(error: BaseException) -> bool:
    """An InfrastructureError that is not a PermanentFailure."""
    return isinstance(error, InfrastructureError) and not isinstance(error, PermanentFailure)


def retrying(
    retries: int,
    backoff_s: float,
    *,
    wait: Callable[[RetryCallState], float] | None = None,
    stop: Callable[[RetryCallState], bool] | None = None,
) -> AsyncRetrying:
    """What awaits ``function(*arguments)`` again while it raises what may heal; raises the last error.

    Args:
        retries: further attempts after the first.
        backoff_s: seconds before the first retry, see ``pause_before_retry``.
        wait, stop: other rules for the pauses and the end.
    """
    return AsyncRetrying(
        retry=retry_if_exception(may_heal),
        stop=stop or stop_after_attempt(retries + 1),
        wait=wait or (lambda state: pause_before_retry(state.attempt_number, backoff_s)),
        reraise=True,
    )
