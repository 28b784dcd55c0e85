"""HTTP server of one engine, shared by the ranks of a trainer: ``python -m rollout.engines.server.server``.

| request | what it does |
|---|---|
| ``GET /health`` | model, longest request, vocabulary, which weights are held |
| ``GET /weights`` | names and shapes of the model's weights |
| ``POST /generate`` | continue token ids (``wire.py``); the request is dropped when the client hangs up |
| ``POST /weights/sees``, ``load`` | weights in files that server and trainer both see |
| ``POST /transfer/METHOD`` | vLLM's own weight transfer (NCCL), with the engine drained or paused |

Bodies are JSON, of the types in ``wire.py``. Each error is one line, ``{"error": ...}``, with a status:

| status | meaning |
|---|---|
| 400, 404, 405, 413 | the request is wrong |
| 401 | the secret is missing or wrong (``common.secret``); a server that other machines reach needs one |
| 408 | the body did not arrive in time |
| 409 | the server holds other weights than the request names |
| 422 | the weights were refused; the old ones still serve |
| 500 | the model's logits are not finite, or the request has ended the engine twice |
| 503 | the engine has died; if that was once too often, the server ends |

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
from pydantic import ValidationError

from common.errors import one_line
from common.http_server import bind, listen, read_body
from common.run_folder import remove_run_folder
from common.secret import add_secret_option, demand_secret, server_secret
from common.validation import first_problem
from rollout.engines.base import UpdateInterrupted, WeightsLost
from rollout.engines.process import EngineProcess
from rollout.engines.server.weights import ServerWeights, WeightsMoved
from rollout.engines.server.wire import LOAD, REQUEST, SEES, TRANSFER, TransferRequest
from rollout.trajectory import InfrastructureError, PermanentFailure

BODY_BYTES, TOKEN_BYTES = 1 << 20, 24  # largest body: a fixed part, and a part per token of the longest request
BODY_S = 60.0  # for a body to arrive
IDLE_S = 75.0  # a connection without a complete request header is closed
STOP_S = 1.0  # that requests may take to finish when the server ends
SENDER_S = 600.0  # of silence, then the sender of a transfer counts as gone
PATHS = "GET /health, GET /weights, POST /generate, POST /weights/sees, POST /weights/load or POST /transfer/METHOD"
METHODS = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "shutdown_weight_transfer_engine",
)  # fmt: skip


class EngineServer:
    """HTTP routes of a server over one started engine. ``failed`` is set when the engine has died."""

    def __init__(self, engine: EngineProcess, secret: str | None = None) -> None:
        self._engine, self._secret = engine, secret
        self.weights = ServerWeights(engine)
        self.failed = asyncio.Event()
        self._running = 0
        self._quiet = asyncio.Event()  # no request is being generated
        self._quiet.set()
        self._open = asyncio.Event()  # cleared while the engine is drained
        self._open.set()
        self._awaited: asyncio.TimerHandle | None = None  # timer for the next call of a transfer

    async def start(self, listener: socket.socket) -> web.AppRunner:
        """Answer HTTP requests on ``listener``, until ``cleanup`` of the returned runner."""
        return await listen(self.app(), listener, "error", PATHS, IDLE_S, STOP_S)

    def app(self) -> web.Application:
        size = BODY_BYTES + TOKEN_BYTES * self._engine.max_length
        app = web.Application(
            client_max_size=size, middlewares=[demand_secret(self._secret, "error"), self._answer_errors]
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
        except ValidationError as error:
            return _refuse(400, first_problem(error, "the body"))
        except (WeightsMoved, WeightsLost) as error:
            return self._other_weights(str(error))
        except ValueError as error:
            return _refuse(422 if request.path.startswith("/weights/") else 400, str(error))
        except PermanentFailure as error:
            return _refuse(500, str(error))
        except InfrastructureError as error:
            if self._engine.gone:
                self.failed.set()
            return _refuse(503, str(error))

    def _other_weights(self, error: str) -> web.Response:
        return _refuse(409, error, **self.weights.state())

    # ------------------------------------------------------------------ tokens
    async def _generate(self, request: web.Request) -> web.Response:
        asked = REQUEST.validate_json(await read_body(request, BODY_S))
        await self._open.wait()
        if self.weights.refusal or asked.weights != self.weights.tag:
            found = self.weights.refusal or f"weights {self.weights.tag}, version {self.weights.version}"
            return self._other_weights(f"the request names weights {asked.weights}; the server holds: {found}")
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
        return web.json_response(
            {"sha256": self.weights.sees(SEES.validate_json(await read_body(request, BODY_S)).path)}
        )

    async def _load(self, request: web.Request) -> web.Response:
        body = LOAD.validate_json(await read_body(request, BODY_S))
        await _to_its_end(self.weights.load(body.paths, body.tag, body.version, body.replaces, body.between_steps))
        return web.json_response(self.weights.state())

    async def _transfer(self, request: web.Request) -> web.Response:
        """Pass one call of vLLM's weight transfer to the engine: init, start, update (any number), or finish.

        Between start and finish the engine samples nothing, and new requests are answered 409. If the transfer breaks
        off, the engine samples nothing until whole weights arrive. Requests in flight finish before the start; with
        ``between_steps`` they pause until the finish. If the sender disappears in between, the engine is restarted."""
        method, body = request.match_info["method"], TRANSFER.validate_json(await read_body(request, BODY_S))
        if method not in METHODS:
            raise ValueError(f"{method[:100]} is not a call of a weight transfer; expected one of {', '.join(METHODS)}")
        if self._engine.info.get("weight_transfer") != "nccl":
            raise ValueError("this server takes weights by files; for transfers start it with weight_transfer: nccl")
        starts, ends = method == "start_weight_update", method == "finish_weight_update"
        if (body.tag is not None) != (starts or ends) or (body.version is not None) != ends:
            raise ValueError(f"{method}: expected a tag at the start and the finish, and a version at the finish alone")
        if starts and not body.between_steps:
            await self._drain()
        await _to_its_end(self._pass_on(method, body))
        return web.json_response(self.weights.state())

    async def _pass_on(self, method: str, body: TransferRequest) -> None:
        async with self.weights.lock:
            if method in METHODS[1:4]:
                self._engine.check_transfer(method)
            self.weights.expect(method, body.tag)
            self._awaited = self._awaited and self._awaited.cancel()  # during the call its heartbeat is watched
            try:
                await self._engine.transfer(method, body.arguments, body.version)
                if method == "finish_weight_update":
                    self.weights.fit(body.tag or "", body.version or 0)
            except UpdateInterrupted:
                self.weights.give_up()
                raise
            except ValueError:
                if method == "start_weight_update":  # its state is unknown
                    self._restart_engine("a weight transfer failed at its start")
                raise
            finally:
                self._await_sender()

    def _await_sender(self) -> None:
        """Restart the engine if the next call of a transfer does not come in time."""
        later, why = asyncio.get_running_loop().call_later, f"its sender was silent for {SENDER_S:g} s"
        lost = (self._restart_engine, f"a weight transfer broke off: {why}", self._engine.pid)
        self._awaited = later(SENDER_S, *lost) if self.weights.sending else None

    def _restart_engine(self, why: str, pid: int | None = None) -> None:
        """Replace the engine's child process by a new one. With ``pid``, do so only if this is still the child's
        process id."""
        if pid in (None, self._engine.pid):
            self._engine.restart(why)
        self.weights.give_up()

    async def _drain(self) -> None:
        """Wait until the engine has finished the requests in flight, and admit no others meanwhile. Cancelled when the
        client hangs up."""
        self._open.clear()
        try:
            await self._quiet.wait()
        finally:
            self._open.set()


def _refuse(status: int, error: str, **more: Any) -> web.Response:
    return web.json_response({"error": one_line(error), **more}, status=status)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` even if the client hangs up, because the engine goes on loading and the tag must match."""
    await asyncio.shield(asyncio.ensure_future(work))


def make_engine(description: str) -> EngineProcess:
    """Make an engine from JSON text, ``{"class_path": ..., "init_args": {...}}``. Raises ValueError unless the class is
    an `EngineProcess`."""
    config = json.loads(description)
    module, _, name = config["class_path"].rpartition(".")
    engine = getattr(importlib.import_module(module), name)(**config.get("init_args", {}))
    if not isinstance(engine, EngineProcess):
        raise ValueError(f"{config['class_path']} cannot be served; expected an EngineProcess such as VLLMEngine")
    return engine


async def serve(engine: EngineProcess, listener: socket.socket, host: str, secret: str | None) -> int:
    """Serve an engine over HTTP until SIGTERM, SIGINT or the engine's death. Returns the exit code."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await engine.start()
    server = EngineServer(engine, secret)
    runner = await server.start(listener)
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
    parser.add_argument("--engine", required=True, help="class_path and init_args of the engine, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, and needs a secret")
    add_secret_option(parser)
    parser.add_argument("--port", type=int, default=8100, help="port to listen on; 0 takes a free one")
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
    remove_run_folder()
    os._exit(code)  # without waiting for the threads of the engine's pipe


if __name__ == "__main__":
    main()
