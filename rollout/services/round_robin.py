"""Client of several equal HTTP services: round robin, a limit of requests in flight, retries."""

from __future__ import annotations

import itertools
import logging
import math
import time
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from rollout.services.http_client import Answer, ApiKey, LoopSession, post_json
from rollout.services.retries import may_heal, pause_before_retry
from rollout.trajectory import InfrastructureError, PermanentFailure

_LONGEST_PAUSE_S = 60.0  # that a server may ask for, and between attempts of those who have patience
_WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class _Busy(InfrastructureError):
    """Status 429 or 5xx."""

    def __init__(self, message: str, pause_s: float) -> None:
        super().__init__(message)
        self.pause_s = pause_s  # that the server asks for


class RoundRobinClient:
    """Asks one of several equal addresses, the next one each time.

    Connection errors, missed deadlines, status 429 and 5xx are tried again at the next URL after a pause of
    ``backoff * 2**attempt`` seconds, times a random factor between 0.5 and 1.5, or after the seconds of a Retry-After
    header if these are more. Other statuses are not: they would come again.

    Use it from one event loop at a time; a new loop gets new connections.

    Args:
        owner: the class that asks, in messages.
        what: what is asked, in messages, such as a model's name.
        urls: addresses of POST requests.
        key: of the services.
        timeout: seconds for one attempt, waiting for a free slot not counted.
        retries: further attempts after the first.
        backoff: seconds before the first retry.
        concurrency: requests in flight at once.

    Raises:
        ValueError: an impossible option, or the key is not set.
    """

    def __init__(
        self,
        owner: str,
        what: str,
        urls: list[str],
        key: ApiKey,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 32,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f'urls: expected at least one "http://host:port/v1"; found {urls}')
        if timeout <= 0 or retries < 0 or backoff < 0 or concurrency < 1:
            raise ValueError(
                "expected timeout > 0, retries >= 0, backoff >= 0, concurrency >= 1; found "
                f"{timeout}, {retries}, {backoff}, {concurrency}"
            )
        self.what, self.urls, self.key = what, list(urls), key
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.key.headers()  # raises before any work is done
        self._next_url = itertools.cycle(self.urls)
        self._session = LoopSession(owner, concurrency)
        self._warned = float("-inf")

    async def post(self, payload: dict[str, Any], patience: float | None = None) -> tuple[Answer, str]:
        """The first answer of status 200, and the URL that gave it.

        Args:
            payload: the body, sent as JSON.
            patience: seconds from the first failure to the last attempt, instead of ``retries``; pauses grow to a
                minute, and the log says once a minute what is waited for.

        Raises InfrastructureError, which names every attempt's server and failure, when no attempt brought one;
        PermanentFailure when a server refuses the request (its key, its model, its length).
        """
        failures: list[str] = []
        deadline = math.inf  # of the last attempt, where there is patience

        async def attempt() -> tuple[Answer, str]:
            nonlocal deadline
            url = next(self._next_url)
            try:
                return _accepted(await self.post_once(url, payload), url), url
            except InfrastructureError as error:
                failures.append(str(error))
                deadline = min(deadline, time.monotonic() + (patience or 0))
                raise

        def pause(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            usual = pause_before_retry(min(state.attempt_number, 20), self.backoff)
            asked = error.pause_s if isinstance(error, _Busy) else 0.0
            if patience is None:
                return max(asked, usual)
            left = max(deadline - time.monotonic(), 0.0)
            self._warn(failures[-1], left)
            return min(max(asked, min(usual, _LONGEST_PAUSE_S)), left)

        late = stop_after_attempt(self.retries + 1) if patience is None else lambda _: time.monotonic() >= deadline
        again = AsyncRetrying(retry=retry_if_exception(may_heal), stop=late, wait=pause, reraise=True)
        try:
            return await again(attempt)
        except InfrastructureError as error:
            kind = PermanentFailure if isinstance(error, PermanentFailure) else InfrastructureError
            reasons = "; ".join(dict.fromkeys(failures))
        raise kind(f"no reply from {self.what} after {len(failures)} attempt(s): {reasons}")

    def _warn(self, failure: str, left: float) -> None:
        now = time.monotonic()
        if now - self._warned >= _WARN_EVERY_S:
            self._warned = now
            logger.warning("no reply from %s (%s); asking on for %.0f s", self.what, failure, left)

    async def post_once(self, url: str, payload: dict[str, Any]) -> Answer:
        """One attempt at one address, as soon as a slot is free; any status is an answer."""
        session, slots = self._session.open()
        async with slots:
            return await post_json(session, url, payload, self.key, self.timeout)

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        await self._session.close()


def _accepted(answer: Answer, url: str) -> Answer:
    """The answer, if its status is 200. Raises _Busy, or PermanentFailure where any attempt would be refused."""
    if answer.status == 200:
        return answer
    failure = f"{url}: status {answer.status}: {answer.excerpt}"
    if answer.status != 429 and answer.status < 500:
        raise PermanentFailure(failure)
    raise _Busy(failure, _asked_pause(answer))


def _asked_pause(answer: Answer) -> float:
    """Seconds of a Retry-After header, at most a minute; 0.0 without one, or when it is a date."""
    asked = next((value for name, value in answer.headers.items() if name.lower() == "retry-after"), "")
    return min(float(asked), _LONGEST_PAUSE_S) if asked.isascii() and asked.isdigit() else 0.0
