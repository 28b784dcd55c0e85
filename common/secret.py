"""The shared secret of search servers and vLLM servers that other machines reach.

Servers and clients read it from the environment variable ``COMPACT_AGENTS_SECRET``, a server also from a file
(``--secret-file``). It is never an argument, because every user of a machine can read arguments. Clients send it as
``Authorization: Bearer SECRET``. A server with a secret requires it at every address.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware
    from aiohttp.web import Request, StreamResponse

SECRET_VARIABLE = "COMPACT_AGENTS_SECRET"


def authorization() -> dict[str, str]:
    """Return the HTTP header with the shared secret of the servers, or {} if the environment has no secret. Raises
    ValueError for a secret that a header cannot contain."""
    secret = _given()
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def add_secret_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secret-file", type=Path,
        help=f"file with the secret that clients must send (default: {SECRET_VARIABLE} of the environment); one of the "
        "two is required if other machines can reach --host",
    )  # fmt: skip


def server_secret(listener: socket.socket, file: Path | None) -> str | None:
    """Return the secret that clients must send to a server, or None if no secret is set and only this machine can reach
    the server.

    Raises:
        ValueError: other machines can reach the server and it has no secret, or the secret is malformed.
        OSError: the file cannot be read.
    """
    secret = read_secret(file) if file is not None else _given()
    address = listener.getsockname()[0]
    if secret is None and not is_local(address):
        raise ValueError(
            f"other machines can reach {address}, so the server needs a secret: set {SECRET_VARIABLE} in the "
            "environment of server and clients (openssl rand -hex 32), or give --secret-file"
        )
    return secret


def read_secret(file: Path) -> str:
    """Return the secret in a file. Raises ValueError unless the file has exactly one word of ASCII characters."""
    secret = _checked(file.read_text(errors="replace"), str(file))
    if secret is None:
        raise ValueError(f"the secret file {file} is empty; write a secret into it (openssl rand -hex 32)")
    return secret


def is_local(host: str) -> bool:
    """Return whether an address is reachable only from this machine. False for host names other than localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def demand_secret(secret: str | None, key: str) -> Middleware:
    """Return an aiohttp middleware that answers requests without the secret with status 401, and a JSON message under
    ``key``."""
    from aiohttp import web  # a slow import, which clients do not need

    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def demand(request: Request, handler: Handler) -> StreamResponse:
        sent = request.headers.get("Authorization")
        if secret is None or hmac.compare_digest((sent or "").encode("utf-8", "surrogateescape"), expected):
            return await handler(request)
        line = missing_secret(sent is not None)
        return web.json_response({key: line}, status=401, headers={"WWW-Authenticate": "Bearer"})

    return demand


def missing_secret(another: bool) -> str:
    """Return the answer to a request without a server's secret, or with ``another`` one."""
    found = "another was sent" if another else "none was sent"
    return f"this server requires its secret, {found}: set {SECRET_VARIABLE} of the client to the server's"


def _given() -> str | None:
    return _checked(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)


def _checked(text: str, where: str) -> str | None:
    secret = text.strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ValueError(f"{where} is not a secret: expected one word of ASCII characters (openssl rand -hex 32)")
    return secret or None
