"""Middleware of ``vllm serve`` that demands the shared secret: ``--middleware rollout.engines.vllm_servers.door.Door``.

vLLM's own ``--api-key`` guards only paths that begin with /v1, /v2 or /inference (vLLM 0.32,
entrypoints/serve/middleware/authenticate.py), and so leaves weight updates open to everyone.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from common.secret import authorization, missing_secret

Call = Callable[..., Awaitable[None]]
OPEN_PATHS = ("/health",)  # for probes of Kubernetes and others


class Door:
    """ASGI middleware: answers requests without the secret with status 401. Without a secret in the server's
    environment (``common.secret``) all requests pass."""

    def __init__(self, app: Call) -> None:
        self._app = app
        self._expected = authorization().get("Authorization", "").encode()

    async def __call__(self, scope: dict[str, Any], receive: Call, send: Call) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS or not self._expected:
            return await self._app(scope, receive, send)
        sent = dict(scope["headers"]).get(b"authorization")
        if hmac.compare_digest(sent or b"", self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = json.dumps({"error": {"message": missing_secret(sent is not None)}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})
