"""HTTP client of the rollout: API keys from the environment, one JSON request."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from rollout.trajectory import InfrastructureError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
NOT_ALLOWED = (401, 403)  # statuses of a key that the service refuses
_EXCERPT = 300  # characters of a service's answer that a message quotes


class ApiKey:
    """API key in an environment variable. The key is read for each request, kept in no object, and removed from what
    services say.

    Args:
        variable: name of the environment variable, in capitals, or None if the service needs no key.
        purpose: use of the key, for messages.

    Raises:
        ValueError: ``variable`` is not such a name. The message does not repeat it, because it may be a key.
    """

    def __init__(self, variable: str | None, purpose: str) -> None:
        if variable is not None and not _VARIABLE.fullmatch(variable):
            raise ValueError(
                f"the key of {purpose}: expected the NAME of an environment variable in capitals, such as "
                "SERVICE_API_KEY; found something else. Put the key itself into the environment, never into a file"
            )
        self.variable, self.purpose = variable, purpose

    def headers(self) -> dict[str, str]:
        """Return the HTTP authorisation header; empty without a key. Raises ValueError when the variable is not set, or
        cannot be a key."""
        if self.variable is None:
            return {}
        key = os.environ.get(self.variable, "").strip()
        if not key:
            raise ValueError(f"{self.purpose} needs a key: set the environment variable {self.variable}")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(f"the environment variable {self.variable} does not hold a key: spaces or odd characters")
        return {"Authorization": f"Bearer {key}"}

    def redact(self, text: str) -> str:
        key = os.environ.get(self.variable, "").strip() if self.variable is not None else ""
        return text.replace(key, "***") if key else text

    def __repr__(self) -> str:
        return f"ApiKey({self.variable})"


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of an HTTP service: status, headers and body. The body is unchanged: a key such as "EMPTY" may occur in
    it."""

    status: int
    body: str
    excerpt: str  # the beginning of the body without the key, for messages
    headers: Mapping[str, str]  # without the key


async def post_json(
    session: aiohttp.ClientSession, url: str, payload: dict[str, Any], key: ApiKey, timeout_s: float
) -> Answer:
    """Send ``payload`` as JSON by POST and return the HTTP response, whatever its status.

    Raises:
        InfrastructureError: no connection, no answer within ``timeout_s``, or not HTTP. It is not chained to aiohttp's
            error, which holds the request's headers and so the key.
        ValueError: the key is missing.
    """
    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")  # half a surrogate pair becomes "?"
    headers = {"Content-Type": "application/json"} | key.headers()
    try:
        async with asyncio.timeout(timeout_s):
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                content = await response.read()
                text = content.decode("utf-8", "replace")
                excerpt = " ".join(key.redact(text)[:_EXCERPT].split()) or "(an empty body)"
                seen = {name: key.redact(value) for name, value in response.headers.items()}
                return Answer(response.status, text, excerpt, seen)
    except TimeoutError:
        failure = f"{url}: no answer within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        failure = key.redact(f"{url}: {type(error).__name__}: {error}")
    raise InfrastructureError(failure)
