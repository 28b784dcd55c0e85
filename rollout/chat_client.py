"""A client of OpenAI-compatible chat endpoints: for models that judge or summarise, not for the policy."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

from rollout.retries import pause_before_retry
from rollout.services import NOT_ALLOWED, Answer, ApiKey, LoopSession, post_json
from rollout.trajectory import InfrastructureError, PermanentFailure

_LONGEST_PAUSE_S = 60.0  # that a server may ask for
_OWN_FIELDS = frozenset({"model", "messages", "stream", "n", "temperature", "top_p", "max_tokens"})


class ChatClient:
    """Asks one of several equal servers (vLLM, or any other ``/chat/completions``), round robin.

    Connection errors, missed deadlines, status 429 and 5xx are tried again at the next URL after a pause of
    ``backoff * 2**attempt`` seconds, times a random factor between 0.5 and 1.5, or after the seconds of a Retry-After
    header if these are more. Other statuses and answers of another shape are not: they would come again.

    Use it from one event loop at a time; a new loop gets new connections.

    Args:
        urls: base addresses such as ``["http://127.0.0.1:8001/v1"]``.
        model: the name under which the servers know it.
        api_key_variable: name of the environment variable that holds the key; None: no key is sent.
        timeout: seconds for one attempt, waiting for a free place not counted.
        retries: further attempts after the first.
        backoff: seconds before the first retry.
        concurrency: requests under way at once.
        extra: further fields of each request, such as ``{"chat_template_kwargs": {"enable_thinking": false}}``.

    Raises:
        ValueError: an impossible option, or the key is not set.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        api_key_variable: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 32,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f'urls: expected at least one "http://host:port/v1"; found {urls}')
        if timeout <= 0 or retries < 0 or backoff < 0 or concurrency < 1:
            raise ValueError(
                "expected timeout > 0, retries >= 0, backoff >= 0, concurrency >= 1; found "
                f"{timeout}, {retries}, {backoff}, {concurrency}"
            )
        if taken := sorted(_OWN_FIELDS & set(extra or {})):
            raise ValueError(f"extra holds {taken}, which the client sets itself")
        self.urls = [url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions" for url in urls]
        self.model, self.extra = model, dict(extra or {})
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.key = ApiKey(api_key_variable, f"the chat endpoint of {model}")
        self.key.headers()  # raises before any work is done
        self._next_url = itertools.cycle(self.urls)
        self._session = LoopSession("ChatClient", concurrency)

    async def complete(
        self, messages: Sequence[dict[str, str]], *, temperature: float, max_tokens: int, top_p: float = 1.0
    ) -> str:
        """The text of one reply to ``messages`` ({"role", "content"} each).

        Raises InfrastructureError, which names every attempt's server and failure, when no attempt brought a reply;
        PermanentFailure when the key is not accepted.
        """
        payload = {"model": self.model, "messages": list(messages), "temperature": temperature, "top_p": top_p}
        payload |= {"max_tokens": max_tokens, **self.extra}
        failures: list[str] = []
        kind, pause = InfrastructureError, 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(max(pause, pause_before_retry(attempt, self.backoff)))
            url, pause = next(self._next_url), 0.0
            try:
                answer = await self._ask(url, payload)
            except InfrastructureError as error:
                failures.append(str(error))
                continue
            if answer.status == 200:
                return _reply(answer, url)
            failures.append(f"{url}: status {answer.status}: {answer.excerpt}")
            if answer.status != 429 and answer.status < 500:
                kind = PermanentFailure if answer.status in NOT_ALLOWED else InfrastructureError
                break
            pause = _asked_pause(answer)
        raise kind(
            f"no reply from {self.model} after {len(failures)} attempt(s): " + "; ".join(dict.fromkeys(failures))
        )

    async def _ask(self, url: str, payload: dict[str, Any]) -> Answer:
        session, places = self._session.open()
        async with places:
            return await post_json(session, url, payload, self.key, self.timeout)

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        await self._session.close()


def _reply(answer: Answer, url: str) -> str:
    """The first choice's text. Raises InfrastructureError for another shape."""
    try:
        text = json.loads(answer.body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):  # servers with a reasoning parser send null when nothing follows the reasoning
        raise InfrastructureError(
            f'{url}: expected {{"choices": [{{"message": {{"content": text}}}}]}}; found {answer.excerpt}'
        )
    return text


def _asked_pause(answer: Answer) -> float:
    """Seconds of a Retry-After header, at most a minute; 0.0 without one, or when it is a date."""
    asked = next((value for name, value in answer.headers.items() if name.lower() == "retry-after"), "")
    return min(float(asked), _LONGEST_PAUSE_S) if asked.isascii() and asked.isdigit() else 0.0
