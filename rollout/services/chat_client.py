"""Client of OpenAI-compatible chat endpoints, for models that judge or summarise (not for the policy)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from common.text import whole
from rollout.services.http_client import Answer, ApiKey
from rollout.services.round_robin import RoundRobinClient
from rollout.trajectory import InfrastructureError

_OWN_FIELDS = frozenset({"model", "messages", "stream", "n", "temperature", "top_p", "max_tokens"})


def chat_addresses(urls: Sequence[str]) -> list[str]:
    """Return the addresses of ``/chat/completions`` below base addresses such as ``http://127.0.0.1:8001/v1``."""
    return [url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions" for url in urls]


class ChatClient(RoundRobinClient):
    """Client of several equal chat servers with OpenAI's ``/chat/completions`` (vLLM or any other).
    ``RoundRobinClient`` says which failures are retried. An answer of another shape is not retried, because it would
    come again.

    Use it from one event loop at a time; a new loop gets new connections.

    Args:
        urls: base addresses such as ``["http://127.0.0.1:8001/v1"]``.
        model: the name of the model on the servers.
        api_key_variable: name of the environment variable that holds the key, or None for no key.
        timeout: seconds for one attempt; waiting for a free slot does not count.
        retries: further attempts after the first.
        backoff: seconds before the first retry.
        concurrency: requests in flight at once.
        extra: further fields of each request, such as ``{"chat_template_kwargs": {"enable_thinking": false}}``.

    Raises:
        ValueError: a wrong address, a field in ``extra`` that the client sets itself, or the key is not set.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        api_key_variable: str | None = None,
        timeout: PositiveFloat = 120.0,
        retries: NonNegativeInt = 3,
        backoff: NonNegativeFloat = 1.0,
        concurrency: PositiveInt = 32,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if taken := sorted(_OWN_FIELDS & set(extra or {})):
            raise ValueError(f"extra holds {taken}, which the client sets itself")
        urls = chat_addresses(urls)
        self.model, self.extra = model, dict(extra or {})
        key = ApiKey(api_key_variable, f"the chat endpoint of {model}")
        super().__init__("ChatClient", model, urls, key, timeout, retries, backoff, concurrency)

    async def complete(
        self, messages: Sequence[dict[str, str]], *, temperature: float, max_tokens: int, top_p: float = 1.0
    ) -> str:
        """Return the text of one reply to ``messages`` ({"role", "content"} each).

        Raises InfrastructureError if no attempt brought a reply; it names every attempt's server and failure. Raises
        PermanentFailure if the key is refused.
        """
        payload = {"model": self.model, "messages": list(messages), "temperature": temperature, "top_p": top_p}
        answer, url = await self.post(payload | {"max_tokens": max_tokens, **self.extra})
        return _reply(answer, url)


def _reply(answer: Answer, url: str) -> str:
    """Return the text of the first choice in a chat server's answer. Raises InfrastructureError for an answer of
    another shape."""
    try:
        text = whole(json.loads(answer.body)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):  # servers with a reasoning parser send null when nothing follows the reasoning
        raise InfrastructureError(
            f'{url}: expected {{"choices": [{{"message": {{"content": text}}}}]}}; found {answer.excerpt}'
        )
    return text
