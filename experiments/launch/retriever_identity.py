"""Identifies the indexes behind the URL of a search server. The key of a stage contains the URL alone.

Before a stage starts, the runner asks its search servers for their indexes and stores the answer in stage.json and
result.json. It refuses to continue a stage, or to use one, that was made with other indexes behind the same URL.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, init_args_of

CLIENT = "retrieval.client.RetrieverClient"
UNKNOWN = "unknown"  # for a server without such an answer, as Search-R1's
TIMEOUT_S = 10.0

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without a proxy, as the client

Identity = str | list[dict[str, Any]]  # UNKNOWN, or kind, corpus_sha256 and passages of every index


def describe(config: Config, name: str, serve: str) -> dict[str, Identity]:
    """Return which search indexes each search server of a stage serves, by the server's address.

    An address is a URL, or ``file:PATH`` with the current URL in the file.

    Waits for a server that is loading as long as the client would. ``serve``: the command that starts a server.

    Raises:
        ExperimentError: nothing answers at a URL, a server loads for too long, or servers that should be equal serve
            different indexes.
    """
    described: dict[str, Identity] = {}
    from retrieval.client import LOADING_TIMEOUT_S

    for client in init_args_of(config, CLIENT):
        patience = float(client.get("loading_timeout", LOADING_TIMEOUT_S))
        urls = [url.rstrip("/").removesuffix("/retrieve") for url in client["urls"]]  # as the client shortens them
        described |= (group := {url: identity(url, name, patience, serve) for url in urls})
        known = [url for url in urls if group[url] != UNKNOWN]
        for url in known[1:]:
            if group[url] != group[known[0]]:
                raise ExperimentError(
                    f"'{name}': the search servers at {known[0]} ({_words(group[known[0]])}) and {url} "
                    f"({_words(group[url])}) share one client's questions, so they must serve the same indexes"
                )
    return described


def identity(url: str, name: str, loading_timeout: float, serve: str) -> Identity:
    """Ask a search server which indexes it serves (``GET <url>/health``), and return them. Returns UNKNOWN if the
    server has no such page. Waits up to ``loading_timeout`` seconds for a server that is loading."""
    from common.secret import SECRET_VARIABLE, authorization
    from retrieval.client import FILE_PREFIX, LOADING_PAUSE_S, current_url, loading_detail

    try:
        base = current_url(url).rstrip("/").removesuffix("/retrieve")
    except OSError as error:
        raise ExperimentError(
            f"'{name}' searches over the server whose address is in {url.removeprefix(FILE_PREFIX)}, which cannot "
            f"be read ({error.strerror}): start the server with its option --announce FILE: {serve}"
        ) from None
    began, told = time.monotonic(), False
    question = urllib.request.Request(f"{base}/health")
    for header in authorization().items():
        question.add_unredirected_header(*header)
    while True:
        try:
            with _DIRECTLY.open(question, timeout=TIMEOUT_S) as answer:
                indexes = json.load(answer)["indexes"]
                return [{key: index[key] for key in ("kind", "corpus_sha256", "passages")} for index in indexes]
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise ExperimentError(
                    f"'{name}' searches over {base}, which wants another secret than is sent: start it with the same "
                    f"folder of outputs, or set {SECRET_VARIABLE} to its secret"
                ) from None
            loading = loading_detail(error.read()) if error.code == 503 else None
            if loading is None:
                return UNKNOWN
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            return UNKNOWN  # another answer
        except OSError as error:
            raise ExperimentError(
                f"'{name}' searches over {base}, where no server answers ({error}): start one in another shell with "
                f"{serve}, or name the right address (--paths.retriever)"
            ) from None
        if time.monotonic() - began > loading_timeout:
            raise ExperimentError(
                f"'{name}' searches over {base}, which is still loading after {loading_timeout:g} s ({loading}): begin "
                "when it says that it is ready, or raise the client's loading_timeout"
            )
        if not told:
            print(f"'{name}' waits for the search server at {base}, which is loading: {loading}", flush=True)
            told = True
        time.sleep(LOADING_PAUSE_S)


def require_same(name: str, earlier: Mapping[str, Identity], now: Mapping[str, Identity], again: str) -> None:
    """Raise ExperimentError if a search server now serves other indexes than when stage ``name`` began.

    Args:
        again: the command that makes the stage again.
    """
    for url, before in earlier.items():
        present = now.get(url, UNKNOWN)
        if UNKNOWN not in (before, present) and before != present:
            raise ExperimentError(
                f"'{name}' was made with another index behind {url}: {_words(before)} then, {_words(present)} now. "
                f"Serve the former one there, or give the new one another URL, or make '{name}' again: "
                f"{again}"
            )


def _words(identity: Identity) -> str:
    if isinstance(identity, str):
        return identity
    return " + ".join(f"{i['kind']}, {i['passages']} passages, corpus {i['corpus_sha256'][:12]}" for i in identity)
