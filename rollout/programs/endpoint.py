"""HTTP endpoint in the forms of OpenAI and Anthropic, in front of the rollout engine. Every rollout has its own secret
address.

| request | what it does |
|---|---|
| ``POST /s/SECRET/v1/chat/completions`` | sample the model's next turn; also as a stream |
| ``POST /s/SECRET/v1/responses`` | the same in the form of OpenAI's responses |
| ``POST /s/SECRET/v1/messages`` | the same in the form of Anthropic's messages |
| ``POST /s/SECRET/v1/reward`` | the program's reward: ``{"reward": 1.0, "metrics": {"solved": 1}}`` |
| ``GET /s/SECRET/v1/models`` | the model |

Errors have the form of the dialect: 400 for a request that cannot be answered
or is over a limit, 404 for an unknown secret, 410 after the end of the rollout, 503 where the engine has failed. It
listens on this machine only.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from common.http_server import bind, listen, read_body
from rollout.programs.base import Model
from rollout.programs.dialects import chat_completions, messages, responses
from rollout.programs.requests import NAME, ChatRequest, Reply, RequestError
from rollout.programs.session import GONE, Session
from rollout.trajectory import RewardError

BODY_BYTES = 64 << 20
BODY_S, IDLE_S, STOP_S = 60.0, 600.0, 1.0
ENDED = 10_000  # secrets of rollouts that are over, which are answered 410


class Dialect(Protocol):
    """A form of requests and answers. ``kept`` belongs to the rollout and lasts as long."""

    def read(self, body: Any, kept: dict[str, list[Any]]) -> ChatRequest: ...

    def answer(self, reply: Reply, body: Any, kept: dict[str, list[Any]]) -> dict[str, Any]: ...

    def stream(self, reply: Reply, body: Any, kept: dict[str, list[Any]]) -> str: ...


DIALECTS: dict[str, Dialect] = {"chat/completions": chat_completions, "responses": responses, "messages": messages}
PATHS = f"POST /s/SECRET/v1/{', '.join(DIALECTS)} or reward, or GET /s/SECRET/v1/models"


class Endpoint:
    """Serves the sessions of running rollouts over HTTP. Belongs to one event loop, between ``start`` and ``close``."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=ENDED)
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self) -> None:
        """Listen on a free port. Idempotent."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_answer_errors])
        for path, dialect in DIALECTS.items():
            app.router.add_post(f"/s/{{secret}}/v1/{path}", partial(self._turn, dialect))
        app.router.add_post("/s/{secret}/v1/reward", self._reward)
        app.router.add_get("/s/{secret}/v1/models", self._models)
        listener = bind("127.0.0.1", 0)
        self._runner = await listen(app, listener, "error", PATHS, IDLE_S, STOP_S)
        self._address = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def serve(self, session: Session) -> Iterator[Model]:
        """Make a session reachable inside the block, at a secret address. End it afterwards."""
        secret = secrets.token_urlsafe(24)
        self._sessions[secret] = session
        try:
            yield Model(f"{self._address}/s/{secret}/v1", "rollout", NAME, session.chat)
        finally:
            del self._sessions[secret]
            self._ended.append(secret)
            session.end()

    def _session(self, request: web.Request) -> Session:
        secret = request.match_info["secret"]
        if (session := self._sessions.get(secret)) is not None:
            return session
        if secret in self._ended:
            raise RequestError(GONE, status=410)
        raise RequestError("no rollout has this address; expected OPENAI_BASE_URL as it was given", status=404)

    async def _turn(self, dialect: Dialect, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await _json(request)
        asked = dialect.read(body, session.kept)
        reply = await session.reply(asked)
        if not asked.stream:
            return web.json_response(dialect.answer(reply, body, session.kept))
        # The whole turn is sampled before the first event, so that no token can be lost.
        events = dialect.stream(reply, body, session.kept)
        return web.Response(text=events, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.post_reward(await _json(request))
        return web.json_response({"reward": session.reward})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "rollout"}]})


async def _json(request: web.Request) -> Any:
    body = await read_body(request, BODY_S)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    dialect = messages if "/v1/messages" in request.path else chat_completions
    try:
        return await handler(request)
    except RequestError as error:
        status, body = error.status, dialect.refusal(str(error), error.status, error.code)
    except RewardError as error:
        status, body = 400, dialect.refusal(str(error), 400, None)
    except web.HTTPError as error:
        status, body = error.status, dialect.refusal(error.text or error.reason, error.status, None)
    return web.json_response(body, status=status)
