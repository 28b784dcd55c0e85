"""Middleware of ``vllm serve`` that demands the shared secret.

vLLM's own ``--api-key`` guards only paths that begin with /v1, /v2 or /inference (vLLM 0.32,
entrypoints/serve/middleware/authenticate.py), and so leaves weight updates open to everyone (vllm-project/vllm#18892).
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from common.secret import SECRET_VARIABLE, authorization, missing_secret
from rollout.engines.vllm_servers.flags import REQUIRED_VARIABLE

Call = Callable[..., Awaitable[None]]
OPEN_PATHS = ("/health",)  # for probes of Kubernetes and others


class SecretMiddleware:
    """ASGI middleware that answers requests without the secret with status 401. If the server's environment has no
    secret (``common.secret``), all requests pass; a server that other machines can reach does not start then."""

    def __init__(self, app: Call) -> None:
        self._app = app
        self._expected = authorization().get("Authorization", "").encode()
        if not self._expected and os.environ.get(REQUIRED_VARIABLE):
            raise ValueError(f"other machines can reach this server, so it needs a secret: set {SECRET_VARIABLE}")

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
