"""One engine server, as its clients see it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from rollout.engines.base import Generation, SamplingParams
from rollout.engines.wire import generation_from_json, request_to_json
from rollout.services import LoopSession
from rollout.trajectory import InfrastructureError

HEALTH_S = 10.0  # a server that is alive says so in this time, also while it generates
_EXCERPT = 500


@dataclass(frozen=True, slots=True)
class Held:
    """The weights that the servers are to hold: the push that brought them, and the version they are."""

    tag: str
    version: int
    paths: tuple[str, ...] = ()  # of files that all servers see, while they are kept
    buckets: int = 0  # files of this push that servers keep for one another


class OtherWeights(InfrastructureError):
    """The server does not hold the weights that were asked for."""


class ServerClient:
    """Requests to one server.

    All methods raise InfrastructureError where no server answers or its engine has died, OtherWeights where it holds
    others than those asked for, and ValueError, with what it said, where it refuses.
    """

    def __init__(self, url: str, sessions: LoopSession, timeout_s: float) -> None:
        self.url, self._sessions, self._timeout_s = url.rstrip("/"), sessions, timeout_s
        self.under_way = 0  # requests for tokens
        self.lost: str | None = None  # why no request is sent to it; None: it serves
        self.checked: str | None = None  # the instance (a server's process) whose model is known to be the right one

    def __repr__(self) -> str:
        return self.url

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, weights: str) -> Generation:
        self.under_way += 1
        try:
            body = await self.post("/generate", request_to_json(token_ids, sampling, weights))
        finally:
            self.under_way -= 1
        try:
            return generation_from_json(body)
        except ValueError as error:
            raise InfrastructureError(f"{self.url}: {error}; is it an engine server of the same release?") from None

    async def health(self) -> dict[str, Any]:
        return await self._ask("GET", "/health", timeout_s=HEALTH_S)

    async def shapes(self) -> dict[str, Any]:
        return await self._ask("GET", "/weights")

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("POST", path, json.dumps(body).encode(), "application/json")

    async def put(self, path: str, body: bytes) -> None:
        await self._ask("PUT", path, io.BytesIO(body), "application/octet-stream")  # sent in pieces, from one copy

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | io.BytesIO | None = None,
        kind: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        session, _ = self._sessions.open()
        timeout_s = timeout_s or self._timeout_s
        headers = {"Content-Type": kind} if kind else {}
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
        told = f"{self.url}{path}: status {status}: {said}"
        if status in (400, 422):
            raise ValueError(f"{self.url}: {said}")
        raise (OtherWeights if status == 409 else InfrastructureError)(told)
