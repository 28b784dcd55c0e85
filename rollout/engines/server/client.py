"""HTTP client of one engine server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.errors import one_line
from common.secret import authorization
from common.sessions import LoopSession
from rollout.engines.base import Generation, SamplingParams
from rollout.engines.server.wire import GENERATION, TokenRequest
from rollout.trajectory import InfrastructureError, PermanentFailure

HEALTH_S = 10.0  # a live server answers in this time, even while it generates
_EXCERPT = 500


@dataclass(frozen=True, slots=True)
class ServerWeightState:
    """Identifies the weights that all engine servers must hold, by the push that brought them."""

    tag: str  # of the push that brought them
    version: int
    paths: tuple[str, ...] = ()  # the files of the push, while the sender keeps them

    @classmethod
    def new(cls, version: int, paths: Sequence[str] = ()) -> ServerWeightState:
        """Return the identification of a new push's weights, with a unique tag."""
        return cls(uuid.uuid4().hex, version, tuple(paths))


class OtherWeights(InfrastructureError):
    """The engine server holds other weights than the request names."""


class ServerClient:
    """HTTP client of one engine server.

    All methods raise InfrastructureError if the server does not answer or its engine has died, OtherWeights if it holds
    other weights than the request names, PermanentFailure if another server would fail as well, and ValueError, with
    the server's message, if it refuses the request.
    """

    def __init__(self, url: str, sessions: LoopSession, timeout_s: float) -> None:
        self.url, self._sessions, self._timeout_s = url.rstrip("/"), sessions, timeout_s
        self.in_flight = 0  # requests for tokens
        self.lost: str | None = None  # why it gets no requests (None: it serves)
        self.checked: str | None = None  # the instance (process of the server) whose model was checked
        self.dtype: str | None = None  # of that model

    def __repr__(self) -> str:
        return self.url

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, weights: str) -> Generation:
        self.in_flight += 1
        try:
            request = TokenRequest(list(token_ids), sampling, weights)
            body = await self.post("/generate", dataclasses.asdict(request))
        finally:
            self.in_flight -= 1
        try:
            return GENERATION.validate_python(body)
        except ValueError as error:
            found = one_line(error)
            raise InfrastructureError(f"{self.url}: {found}; is it an engine server of the same release?") from None

    async def health(self) -> dict[str, Any]:
        return await self._ask("GET", "/health", timeout_s=HEALTH_S)

    async def shapes(self) -> dict[str, Any]:
        return await self._ask("GET", "/weights")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", path, json.dumps(body).encode())

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        session, _ = self._sessions.open()
        timeout_s = timeout_s or self._timeout_s
        headers = authorization() | ({"Content-Type": "application/json"} if body else {})
        try:
            async with asyncio.timeout(timeout_s):
                async with session.request(method, self.url + path, data=body, headers=headers) as response:
                    text = await response.text()
        except TimeoutError:
            raise InfrastructureError(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        return self._read(path, response.status, text)

    def _read(self, path: str, status: int, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
            said = answer.get("error", "")
        except (ValueError, AttributeError):
            answer, said = None, " ".join(text[:_EXCERPT].split())
        if status == 200 and answer is not None:
            return answer
        if status in (400, 413, 422):
            raise ValueError(f"{self.url}: {said}")
        kind = {409: OtherWeights, 500: PermanentFailure}.get(status, InfrastructureError)
        raise kind(f"{self.url}{path}: status {status}: {said}")
