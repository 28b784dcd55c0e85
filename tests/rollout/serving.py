"""Local servers that speak as the services outside do."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Served:
    """A running server: where it is and what it was asked. ``most`` requests were in flight at once."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    running: int = 0
    most: int = 0


def answer_of(answer: Any) -> web.Response:
    """A body for status 200, ``(status, body)`` or ``(status, body, headers)``; what is no text is sent as JSON."""
    status, body, headers = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
    return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body), headers=headers)


@asynccontextmanager
async def serving(answer: Callable[[Any], Any | Awaitable[Any]] | list[Any]):
    """A server on 127.0.0.1 for POSTs to any path. ``answer`` makes an answer of a request's JSON (awaited if it must
    be; a ``web.StreamResponse`` is sent as it is), or is a list of answers, of which the last one is given for ever."""
    served = Served()

    async def handle(request: web.Request) -> web.StreamResponse:
        served.bodies.append(await request.json())
        served.headers.append(request.headers)
        served.running += 1
        served.most = max(served.most, served.running)
        try:
            if isinstance(answer, list):
                return answer_of(answer[min(len(served.bodies), len(answer)) - 1])
            given = answer(served.bodies[-1])
            given = await given if asyncio.iscoroutine(given) else given
            return given if isinstance(given, web.StreamResponse) else answer_of(given)
        finally:
            served.running -= 1

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


@asynccontextmanager
async def site(pages, host="127.0.0.1"):
    """A server of pages: path to a response (sent once) or an async handler. Gives its address and what it was
    asked for."""
    asked = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        page = pages[request.path]
        return await page(request) if callable(page) else page

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    tcp = web.TCPSite(runner, host, 0)
    await tcp.start()
    try:
        yield f"http://{host}:{tcp._server.sockets[0].getsockname()[1]}", asked
    finally:
        await runner.cleanup()


def response(body, kind="text/html", **options):
    return web.Response(body=body if isinstance(body, bytes) else body.encode(), content_type=kind, **options)


@asynccontextmanager
async def raw_server(content: bytes):
    """A server that answers every connection with these bytes and closes it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.write(content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def serving_apart(answers: Any):
    """``serving`` in another thread, for code that runs its own event loop."""
    served, ready, done = Served(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal served
        async with serving(answers) as served:
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
