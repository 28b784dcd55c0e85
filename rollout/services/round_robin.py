"""Client of several equal HTTP services: round robin, a limit of requests in flight, retries."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from typing import Any

from common.async_calls import pause_before_retry
from common.sessions import LoopSession
from rollout.services.http_client import Answer, ApiKey, post_json
from rollout.trajectory import InfrastructureError, PermanentFailure

_LONGEST_PAUSE_S = 60.0  # that a server may ask for, or between attempts with ``patience``
_WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class RoundRobinClient:
    """HTTP client that sends each request to the next of several equal services.

    After a connection error, a missed deadline, or status 429 or 5xx, the request goes to the next URL. The pause is
    ``backoff * 2**attempt`` seconds, times a random factor between 0.5 and 1.5, or the seconds of a Retry-After header
    if these are more. Other statuses are final. A new event loop gets new connections.

    Args:
        owner: the class that asks, for messages.
        what: the service, for messages, such as a model's name.
        urls: addresses of POST requests.
        key: the services' key.
        timeout, retries, backoff, concurrency: see ``ChatClient``.

    Raises:
        ValueError: a wrong address, or the key is not set.
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
        self.what, self.urls, self.key = what, list(urls), key
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.key.headers()  # raises before any work is done
        self._next_url = itertools.cycle(self.urls)
        self._session = LoopSession(owner, concurrency)
        self._warned = float("-inf")

    async def post(self, payload: dict[str, Any], patience: float | None = None) -> tuple[Answer, str]:
        """Send ``payload``, with retries, and return the first answer of status 200, and its URL.

        Args:
            payload: the body, sent as JSON.
            patience: seconds from the first failure to the last attempt; replaces ``retries``. Pauses grow to a minute,
                and a warning is logged once a minute.

        Raises:
            InfrastructureError: no attempt succeeded; names every attempt's server and failure.
            PermanentFailure: a server refuses the request (its key, its model, its length).
        """
        failures: list[str] = []
        deadline = math.inf  # of the last attempt, with patience
        while True:
            url = next(self._next_url)
            permanent, asked = False, 0.0
            try:
                answer = await self.post_once(url, payload)
                if answer.status == 200:
                    return answer, url
                failures.append(f"{url}: status {answer.status}: {answer.excerpt}")
                permanent, asked = answer.status != 429 and answer.status < 500, _retry_after(answer)
            except InfrastructureError as error:
                failures.append(str(error))
            now = time.monotonic()
            deadline = min(deadline, now + (patience or 0))
            spent = len(failures) > self.retries if patience is None else now >= deadline
            if permanent or spent:
                kind = PermanentFailure if permanent else InfrastructureError
                reasons = "; ".join(dict.fromkeys(failures))
                raise kind(f"no reply from {self.what} after {len(failures)} attempt(s): {reasons}")
            pause, left = pause_before_retry(min(len(failures), 20), self.backoff), math.inf
            if patience is not None:
                pause, left = min(pause, _LONGEST_PAUSE_S), deadline - now
                if now - self._warned >= _WARN_EVERY_S:
                    self._warned = now
                    logger.warning("no reply from %s (%s); asking on for %.0f s", self.what, failures[-1], left)
            await asyncio.sleep(min(max(asked, pause), left))

    async def post_once(self, url: str, payload: dict[str, Any]) -> Answer:
        """Send one request to ``url``, once fewer than ``concurrency`` are in flight. Returns the answer, whatever its
        status."""
        session, slots = self._session.open()
        async with slots:
            return await post_json(session, url, payload, self.key, self.timeout)

    async def close(self) -> None:
        """Close the HTTP connections; a later request opens new ones."""
        await self._session.close()


def _retry_after(answer: Answer) -> float:
    """Return the seconds that a Retry-After header asks for, at most a minute; 0.0 without one, or when it is a
    date."""
    asked = next((value for name, value in answer.headers.items() if name.lower() == "retry-after"), "")
    return min(float(asked), _LONGEST_PAUSE_S) if asked.isascii() and asked.isdigit() else 0.0
