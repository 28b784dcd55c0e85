"""Search server: ``python -m retrieval.server --index DIR``. A drop-in for Search-R1's retrieval servers.

``POST /retrieve`` takes ``{"queries": [...], "topk": 3, "return_scores": true}`` and answers ``{"result": [...]}``
with one list per query, in order, best first: items ``{"document": D, "score": s}``, or plain ``D`` without scores.
D = ``{id, title, text, contents}`` has all fields of Search-R1's BM25 and dense servers.  ``topk`` absent, null or 0
means the server's default.  ``GET /health`` describes the indexes and counts the work done.

Each error is one line, ``{"detail": ...}``; a wrong or too large request gets status 4xx. Work for a client that hangs
up is dropped. If other machines can reach the server, clients must send a secret (``common.secret``).

The server listens at once. While the retriever is loading, both requests are answered 503 with ``{"status": "loading",
"detail": "..."}``, which reports the progress. ``--announce``, the last line of ``--ready-fd`` and "retriever ready at"
follow when it is loaded.

Exit codes: 0 stopped by SIGTERM, Ctrl-C or the end of its parent; 2 wrong arguments, index or corpus; 3 port in use.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import orjson
import yaml
from aiohttp import web
from jsonargparse import ArgumentParser
from pydantic import BaseModel, Field, ValidationError

from common.errors import one_line
from common.http_server import bind, listen, read_body
from common.ranges import NonNegativeInt
from common.secret import add_secret_option, demand_secret, server_secret
from common.validation import first_problem
from retrieval.batching import Answer, Batcher, OwnerThread
from retrieval.protocols import compare_by_calls, explain
from retrieval.retriever import Retriever, SearchSettings, check_indexes
from retrieval.types import LOADING, Progress, RetrievalFailure, SearchBackend

EXIT_WRONG_INPUT = 2
SETTINGS = [field.name for field in dataclasses.fields(SearchSettings)]
PROGRESS_S = 1.0  # seconds between two checks of the loading progress
STOP_S = 5.0  # seconds that requests may take to end after SIGTERM

# Limits of one request. Search-R1's trainer sends the queries of a whole batch at once, some thousands.
REQUEST_BYTES = 16 << 20
QUERIES = 10_000
TOPK = 1_000
DOCUMENTS = 100_000  # in the answer: queries times topk

IDLE_S = 75.0  # seconds until an unused connection, or one with slow request headers, is closed
BODY_S = 30.0  # seconds for the body of a request
READ_S = 60.0  # seconds until a client that does not take its answer is dropped


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``. Unknown keys are ignored, as in Search-R1's server."""

    queries: list[str] = Field(max_length=QUERIES)
    topk: NonNegativeInt | None = Field(default=None, le=TOPK)
    return_scores: bool = False


class Refused(Exception):
    """A search request is refused, with an HTTP status and the reason in one line."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why)
        self.status, self.why = status, why


class RetrievalServer:
    """The HTTP routes of a search server, whose retriever may still be loading.

    Args:
        topk: passages per query, if the request does not say.
        secret: clients must send it. By default every client is served.
    """

    def __init__(self, owner: OwnerThread, topk: int, secret: str | None = None) -> None:
        self._owner, self._topk, self._secret = owner, topk, secret
        self._batcher = Batcher(owner)

    async def start(self, listener: socket.socket) -> web.AppRunner:
        """Serve HTTP requests on the socket ``listener``, until the returned runner's ``cleanup``."""
        app = web.Application(client_max_size=REQUEST_BYTES, middlewares=[demand_secret(self._secret, "detail")])
        app.router.add_post("/retrieve{slash:/?}", self._retrieve)
        app.router.add_get("/health{slash:/?}", self._health)
        return await listen(app, listener, "detail", "POST /retrieve or GET /health", IDLE_S, STOP_S)

    async def _retrieve(self, http: web.Request) -> web.Response:
        """Answer the search request ``POST /retrieve``. Cancelled when the client hangs up."""
        try:
            request = await _read(http)
            k = request.topk or self._topk
            if len(request.queries) * k > DOCUMENTS:
                asked = f"{len(request.queries)} queries with topk {k}"
                raise Refused(422, f"{asked}: expected at most {DOCUMENTS} documents in all; ask in several requests")
        except Refused as refused:
            return _json({"detail": refused.why}, refused.status)
        if not self._owner.ready.done():
            return self._loading()
        try:
            answers = await self._batcher.search([_well_formed(query) for query in request.queries], k)
        except Exception as error:
            print(f"search failed: {error!r}", file=sys.stderr, flush=True)
            return _json({"detail": f"search failed: {error!r}"}, status=500)
        return _json({"result": [_render(answer, request.return_scores) for answer in answers]})

    async def _health(self, _: web.Request) -> web.Response:
        if not self._owner.ready.done():
            return self._loading()
        described = {"status": "ok", "topk": self._topk, "indexes": describe(self._owner.ready.result())}
        return _json(described | dataclasses.asdict(self._batcher.counters))

    def _loading(self) -> web.Response:
        return _json({"status": LOADING, "detail": self._owner.progress}, status=503)


async def _read(http: web.Request) -> RetrieveRequest:
    """Return the validated body of a search request. Raises Refused, or the errors of `read_body`."""
    try:
        body = await read_body(http, BODY_S)
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"the body has more than {REQUEST_BYTES} bytes; ask in several requests") from None
    try:
        return RetrieveRequest.model_validate(json.loads(body))
    except ValidationError as error:
        raise Refused(422, first_problem(error, "the body")) from None
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"the body is not JSON: {one_line(error)}") from None


def _render(answer: Answer, with_scores: bool) -> list[dict]:
    """Return the documents found for one query as JSON data, a superset of the answers of Search-R1's servers."""
    documents = [{"id": d.id, "title": d.title, "text": d.text, "contents": d.contents} for d in answer]
    if not with_scores:
        return documents
    return [{"document": document, "score": d.score} for document, d in zip(documents, answer, strict=True)]


def describe(backend: SearchBackend) -> list[Any]:
    """Return the metadata of a search backend's indexes, or its class name, to show and to compare servers."""
    return getattr(backend, "metadata", None) or [{"kind": f"{type(backend).__module__}.{type(backend).__qualname__}"}]


def _well_formed(text: str) -> str:
    """Return the text with lone surrogates replaced. They are legal in JSON but not in UTF-8, as Lucene and tokenizers
    need.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


class _Progress:
    """Reports the loading progress of a search server, and its address once it is loaded."""

    def __init__(self, owner: OwnerThread, report: dict, ready_fd: int | None, announce: Path | None) -> None:
        self._owner, self._report, self._announce = owner, report, announce
        self._pipe = None if ready_fd is None else os.fdopen(ready_fd, "wb", buffering=0)

    async def follow(self) -> None:
        """Report the loading progress until the retriever is loaded. Ends the process if the loading fails."""
        loaded, said = asyncio.wrap_future(self._owner.ready), None
        try:
            while not (await asyncio.wait([loaded], timeout=PROGRESS_S))[0]:
                if self._owner.progress != said:
                    said = self._owner.progress
                    print(f"retriever: {said}", file=sys.stderr, flush=True)
                    self._tell({"loading": said})
            loaded.result()
            if self._announce is not None:
                half = self._announce.with_name(f".{self._announce.name}.{os.getpid()}")
                half.write_text(announced_url(self._report))
                half.replace(self._announce)
            print(f"retriever ready at {self._report['url']} (POST /retrieve, GET /health)", flush=True)
            self._tell(self._report)
        except (RetrievalFailure, ValueError, OSError) as error:
            _stop(str(error), EXIT_WRONG_INPUT)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        if self._pipe is not None:
            self._pipe.close()

    def _tell(self, line: dict) -> None:
        if self._pipe is not None:
            self._pipe.write(orjson.dumps(line) + b"\n")


async def serve(
    server: RetrievalServer, owner: OwnerThread, listener: socket.socket, progress: _Progress, url: str
) -> None:
    """Run the search server until SIGTERM or Ctrl-C.

    A second signal, or one during loading, ends the process at once: a graceful end would wait for the load.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def stop(*_: object) -> None:
        if not owner.ready.done() or stopped.is_set():
            os._exit(0)
        loop.call_soon_threadsafe(stopped.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    runner = await server.start(listener)
    print(f"retriever loading at {url}", flush=True)
    await progress.follow()
    await stopped.wait()
    await runner.cleanup()
    owner.close()


def announced_url(report: dict) -> str:
    """Return the search server's URL for other machines. If it listens on all interfaces, the URL has this machine's
    name.
    """
    anywhere = report["url"].startswith(("http://0.0.0.0:", "http://[::]:"))
    return f"http://{socket.gethostname()}:{report['port']}" if anywhere else report["url"]


def listening_socket(host: str, port: int, inherited: int | None = None) -> socket.socket:
    """Return a listening socket (see ``bind``). Ends the process with code 3 if the port is in use."""
    try:
        listener = bind(host, port, inherited)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _stop(f"port {port} on {host} is in use; stop its process, or choose another port with --port", 3)
        _stop(f"cannot listen on {host}, port {port}: {error.strerror}", EXIT_WRONG_INPUT)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_S * 1000))
    return listener


def _stop(message: str, code: int) -> NoReturn:
    print(f"retriever: {message}", file=sys.stderr, flush=True)
    # Not sys.exit, which would wait for a starting JVM or a loading index.
    os._exit(code)


def _leave_with_parent(parent: int, interval: float = 0.5) -> None:
    """End this process when the parent process ends, even by kill -9.

    A prctl death signal would arrive at the end of the *thread* that started this process, and other children of the
    parent can keep a pipe open. The parent's id is exact.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        _stop("the parent process has ended", 0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m retrieval.server", description="Serve passages over HTTP.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--index", nargs="+", help="index folder, or several to fuse (hybrid)")
    source.add_argument("--backend", help="YAML file with class_path and init_args of another backend")
    parser.add_argument("--corpus", help="fail unless the index was built from this file")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines, and needs a secret")
    add_secret_option(parser)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--listen-fd", type=int, help="serve on this socket of the parent instead")
    parser.add_argument("--topk", type=int, default=3, help="passages per query, if the request does not say")
    parser.add_argument("--threads", type=int, default=1, help="threads for Lucene, torch and Faiss")
    parser.add_argument("--k1", type=float, help="BM25's k1 (0.9)")
    parser.add_argument("--b", type=float, help="BM25's b (0.4)")
    parser.add_argument("--java-heap", help="memory of the JVM (1g)")
    parser.add_argument("--encoder", help="folder of the encoder, if it has moved since the build")
    parser.add_argument("--device", help="device of the encoder (auto)")
    parser.add_argument("--ef-search", type=int, help="width of an HNSW search (the index's own)")
    parser.add_argument("--probes", type=int, help="lists per IVF search (the index's own)")
    parser.add_argument("--gpu", action="store_true", default=None, help="exact vectors on all GPUs, as 16-bit floats")
    parser.add_argument("--announce", type=Path, help="write the server's URL into this file when it is ready")
    parser.add_argument("--parent", type=int, help="end when the parent process with this id ends")
    parser.add_argument(
        "--ready-fd", type=int, help='write one JSON line (url, port, pid) here when ready; before it "loading" lines'
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not 1 <= options.topk <= TOPK or options.threads < 1:
        limits = f"--topk must be 1 to {TOPK}, --threads at least 1"
        parser.error(f"{limits}; found {options.topk} and {options.threads}")
    return options


def read_backend(path: str) -> Callable[[], SearchBackend]:
    """Return a function that creates the search backend described in a YAML file. Raises ValueError for an invalid
    file.
    """
    compare_by_calls()
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--backend", type=SearchBackend, required=True)
    try:
        parsed = parser.parse_object({"backend": yaml.safe_load(Path(path).read_text())})
    except OSError:
        raise
    except Exception as error:  # PyYAML raises ValueError for !!int abc, KeyError for !!bool abc
        reason = explain(one_line(error))
        raise ValueError(f"{path}: not a backend ({reason}); see docs/new_retriever.md") from error
    return lambda: parser.instantiate_classes(parsed)["backend"]


def load(options: argparse.Namespace, settings: SearchSettings, progress: Progress) -> SearchBackend:
    """Return the opened search backend that ``main`` serves. ``progress``: see ``OwnerThread``."""
    if options.backend is not None:
        progress(f"opening {options.backend}")
        return options.make_backend()
    progress(f"opening {', '.join(options.index)}")
    return Retriever(options.index, settings, progress=progress)


def _require_none_given(options: argparse.Namespace) -> None:
    names = [name for name in ("corpus", *SETTINGS) if name != "threads" and getattr(options, name) is not None]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given:
        raise ValueError(f"{', '.join(given)}: belong to --index; with --backend write them into {options.backend}")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # until it serves
        signal.signal(number, lambda *_: os._exit(0))
    if options.parent is not None:
        _leave_with_parent(options.parent)
    settings = SearchSettings(**{name: getattr(options, name) for name in SETTINGS})
    try:
        if options.backend is None:
            settings.check(check_indexes(options.index, options.corpus))
        else:
            _require_none_given(options)
            options.make_backend = read_backend(options.backend)
        listener = listening_socket(options.host, options.port, options.listen_fd)
        secret = server_secret(listener, options.secret_file)
    except (RetrievalFailure, ValueError, OSError) as error:
        _stop(str(error), EXIT_WRONG_INPUT)
    port = listener.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    report = {"url": f"http://{host}:{port}", "port": port, "pid": os.getpid()}
    owner = OwnerThread(lambda progress: load(options, settings, progress))
    server = RetrievalServer(owner, options.topk, secret)
    progress = _Progress(owner, report, options.ready_fd, options.announce)
    asyncio.run(serve(server, owner, listener, progress, report["url"]))


if __name__ == "__main__":
    main()
