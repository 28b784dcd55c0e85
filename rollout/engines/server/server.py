"""HTTP server of one engine, shared by the ranks of a trainer: ``python -m rollout.engines.server.server``.

| request | what it does |
|---|---|
| ``GET /health`` | model, longest request, vocabulary, which weights are held |
| ``GET /weights`` | names and shapes of the model's weights |
| ``POST /generate`` | continue token ids (``wire.py``); the request is dropped when the client hangs up |
| ``POST /weights/sees``, ``load`` | weights in files that server and trainer both see |
| ``POST /transfer/METHOD`` | vLLM's own weight transfer (NCCL), with the engine drained or at a standstill |

Status 400: the request is wrong; 409: the server does not hold the weights that are asked for; 422: weights were
refused; 503: the engine has died, and the server with it. 401: it wants a secret (``retrieval.secret``), as it must
where other machines reach it.

Exit codes: 0 stopped by SIGTERM or Ctrl-C; 1 the engine has died; 2 wrong arguments or model; 3 port in use.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from retrieval.secret import add_secret_option, demand_secret, server_secret
from rollout.engines.process import EngineProcess
from rollout.engines.server.weights import ServerWeights, WeightsMoved
from rollout.engines.server.wire import REQUEST
from rollout.trajectory import InfrastructureError

REQUEST_BYTES = 64 << 20  # of a request for tokens, at most


class EngineServer:
    """The routes over one started engine. ``failed`` is set when the engine has died."""

    def __init__(self, engine: EngineProcess, secret: str | None = None) -> None:
        self._engine, self._secret = engine, secret
        self.weights = ServerWeights(engine)
        self.failed = asyncio.Event()
        self._running = 0
        self._quiet = asyncio.Event()  # nothing is being generated
        self._quiet.set()
        self._open = asyncio.Event()  # not while it is being drained
        self._open.set()

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=REQUEST_BYTES, middlewares=[demand_secret(self._secret, "error"), self._answer_errors]
        )
        post = {
            "/generate": self._generate,
            "/weights/sees": self._sees,
            "/weights/load": self._load,
            "/transfer/{method}": self._transfer,
        }
        for path, handler in post.items():
            app.router.add_post(path, handler)
        app.router.add_get("/weights", self._shapes)
        app.router.add_get("/health", self._health)
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except WeightsMoved as error:
            return self._other_weights(str(error))
        except (ValueError, KeyError) as error:
            refused = request.path.startswith("/weights/")
            return web.json_response({"error": " ".join(str(error).split())}, status=422 if refused else 400)
        except InfrastructureError as error:
            self.failed.set()
            return web.json_response({"error": str(error)}, status=503)

    def _other_weights(self, error: str) -> web.Response:
        return web.json_response({"error": error, **self.weights.state()}, status=409)

    # ------------------------------------------------------------------ tokens
    async def _generate(self, request: web.Request) -> web.Response:
        asked = REQUEST.validate_python(await request.json())
        await self._open.wait()
        if self.weights.refusal or asked.weights != self.weights.tag:
            found = self.weights.refusal or f"weights {self.weights.tag}, version {self.weights.version}"
            return self._other_weights(f"asked for weights {asked.weights}; the server holds: {found}")
        self._running += 1
        self._quiet.clear()
        try:
            generation = await self._engine.generate(asked.token_ids, asked.sampling)
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()
        return web.json_response(dataclasses.asdict(generation))

    async def _health(self, request: web.Request) -> web.Response:
        info = {k: v for k, v in self._engine.info.items() if k not in ("weights", "tied")}
        about = {"engine": type(self._engine).__name__, "model": self._engine.model, "pid": self._engine.pid}
        about |= {"max_length": self._engine.max_length, "running": self._running}
        return web.json_response({**info, **about, **self.weights.state()})

    async def _shapes(self, request: web.Request) -> web.Response:
        info = self._engine.info
        return web.json_response({"weights": info.get("weights", {}), "tied": info.get("tied", [])})

    # ------------------------------------------------------------------ weights
    async def _sees(self, request: web.Request) -> web.Response:
        return web.json_response({"sha256": self.weights.sees((await request.json())["path"])})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        order = (body["paths"], body["tag"], body["version"], body.get("replaces"), body.get("between_steps", False))
        await _to_its_end(self.weights.load(*order))
        return web.json_response(self.weights.state())

    async def _transfer(self, request: web.Request) -> web.Response:
        """vLLM's own protocol: init, start, update (any number), finish. Between start and finish nothing is sampled
        (new requests are answered 409), and if it ends between them, nothing until whole weights have come. Requests
        in flight finish before the start, or, ``between_steps``, stand still until the finish."""
        method, body = request.match_info["method"], await request.json()
        if method == "start_weight_update":
            if not body.get("between_steps", False):
                await self._drain()
            self.weights.unfit("a transfer of weights has not come to its end; push again")
        await self._engine.transfer(method, body.get("arguments", {}), body.get("version"))
        if method == "finish_weight_update":
            self.weights.fit(body["tag"], body["version"])
        return web.json_response(self.weights.state())

    async def _drain(self) -> None:
        """Let what is being generated end, and admit nothing meanwhile. Given up when the client hangs up."""
        self._open.clear()
        try:
            await self._quiet.wait()
        finally:
            self._open.set()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Also when the client hangs up: the engine would go on loading, and the tag would be wrong."""
    await asyncio.shield(asyncio.ensure_future(work))


def make_engine(description: str) -> EngineProcess:
    """An engine from ``{"class_path": ..., "init_args": {...}}`` as JSON. Raises ValueError if it is none that runs in
    a process of its own."""
    config = json.loads(description)
    module, _, name = config["class_path"].rpartition(".")
    engine = getattr(importlib.import_module(module), name)(**config.get("init_args", {}))
    if not isinstance(engine, EngineProcess):
        raise ValueError(f"{config['class_path']} cannot be served; expected VLLMEngine")
    return engine


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ``port`` 0 takes a free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


async def serve(engine: EngineProcess, listener: socket.socket, host: str, secret: str | None) -> int:
    """Until SIGTERM, SIGINT or the engine's death. Returns the exit code."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await engine.start()
    server = EngineServer(engine, secret)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    where = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    print(f"engine ready at {where} ({engine.model}; POST /generate, GET /health)", flush=True)
    waiting = [asyncio.ensure_future(event.wait()) for event in (stopped, server.failed)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    await engine.close()
    return 1 if server.failed.is_set() else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.engines.server.server", description="Serve an engine over HTTP."
    )
    parser.add_argument("--engine", required=True, help="class_path and init_args as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to serve other machines, with a secret")
    add_secret_option(parser)
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free port")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    try:
        listener = bind(options.host, options.port)
        secret = server_secret(listener, options.secret_file)
        engine = make_engine(options.engine)
        code = asyncio.run(serve(engine, listener, options.host, secret))
    except (ValueError, OSError, ImportError, AttributeError, InfrastructureError) as error:
        print(f"engine server: {error}", file=sys.stderr, flush=True)
        code = 3 if isinstance(error, OSError) and error.errno == errno.EADDRINUSE else 2
    os._exit(code)  # threads of the engine's pipe need not be waited for


if __name__ == "__main__":
    main()
