"""HTTP basics of the search server and of agent programs: listen, read bodies, report errors as one line of JSON."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from common.errors import one_line

BACKLOG = 2048  # connections waiting to be accepted


def bind(host: str, port: int, inherited: int | None = None) -> socket.socket:
    """Return a listening TCP socket. ``inherited``: descriptor of an open socket to use instead of a new one. ``port``
    0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, fileno=inherited)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Without it separate headers and body cost 40 ms of delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if inherited is None:
        listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


async def listen(
    app: web.Application, listener: socket.socket, key: str, paths: str, idle_s: float, stop_s: float
) -> web.AppRunner:
    """Start a web server on an open socket, and return its runner, whose ``cleanup`` stops it. A client that
    disconnects cancels its handler.

    Args:
        key: key of an error message in its JSON.
        paths: description of the accepted requests, for error messages.
        idle_s: seconds after which an unused connection, or one with slow request headers, is closed.
        stop_s: seconds that requests may take to finish at ``cleanup``.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=stop_s)
    listening: list[asyncio.Server] = []

    async def stop_listening(_: web.Application) -> None:
        for server in listening:
            server.close()

    app.on_shutdown.append(stop_listening)
    await runner.setup()
    loop = asyncio.get_running_loop()
    options = {"keepalive_timeout": idle_s, "access_log": None}
    listening.append(
        await loop.create_server(
            lambda: _Handler(key, paths, runner.server, loop=loop, **options), sock=listener, backlog=BACKLOG
        )
    )
    return runner


async def read_body(request: web.Request, within_s: float) -> bytes:
    """Return the whole body of an HTTP request, decompressed.

    Raises:
        HTTPRequestTimeout: the body did not arrive ``within_s`` seconds.
        HTTPRequestEntityTooLarge: the body exceeds the application's limit.
        HTTPBadRequest: the body does not match its headers.
    """
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not arrive within {within_s:g} s") from None
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=_unreadable(str(error))) from None


def _unreadable(why: str) -> str:
    why = one_line(why).rstrip(" ^")
    return (
        f"the request cannot be read: {why[:200]}; expected HTTP/1.1 with a JSON body of the length in its headers, "
        "plain or in the Content-Encoding gzip or deflate"
    )


class _Handler(web.RequestHandler):
    """Answers the HTTP requests of one connection. Every error is a line of JSON, even for bytes that are not HTTP."""

    __slots__ = ("_key", "_paths")

    def __init__(self, key: str, paths: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._key, self._paths = key, paths

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """Log an exception unless a malformed request caused it; the client gets an error message instead."""
        if not isinstance(options.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            super().log_exception(*arguments, **options)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and raises if an answer has begun
        fault = "too slow" if exc is None else type(exc).__name__
        said = _unreadable(message or "") if status < 500 else f"the server failed ({fault}); see its log"
        answer = web.Response(status=status, text=said)
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.Response) and resp.status >= 400 and resp.content_type != "application/json":
            resp = self._as_json(request, resp)
        return await super().finish_response(request, resp, start_time)

    def _as_json(self, request: web.BaseRequest, error: web.Response) -> web.Response:
        said = one_line(error.text or error.reason or "")
        if error.status in (404, 405):
            said = f"{request.method} {request.path[:100]}: {said}; expected {self._paths}"
        kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        answer = web.json_response({self._key: said}, status=error.status, headers=kept)
        if error.keep_alive is False or error.status in (408, 413):  # do not wait for the rest of the body
            answer.force_close()
        return answer
