"""The shared secret of servers that other machines reach, search servers and engine servers alike.

It stands in the environment variable ``COMPACT_AGENTS_SECRET``, of servers and of clients, or for a server in a file
(``--secret-file``): never in arguments, which every user of a machine can read. Clients send it as
``Authorization: Bearer SECRET``. A server that has one demands it, on whatever address it listens.
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
    """The header that a client sends; none where the environment holds no secret. Raises ValueError for one that no
    header can hold."""
    secret = _given()
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def add_secret_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secret-file", type=Path,
        help=f"file with the secret that clients must send (default: {SECRET_VARIABLE} of the environment); one of the "
        "two is required where --host is reached from other machines",
    )  # fmt: skip


def server_secret(listener: socket.socket, file: Path | None) -> str | None:
    """What clients must send to the server on ``listener``; None: nothing.

    Raises:
        ValueError: other machines reach it and there is no secret, or what is given is none.
        OSError: the file cannot be read.
    """
    secret = read_secret(file) if file is not None else _given()
    address = listener.getsockname()[0]
    if secret is None and not is_local(address):
        raise ValueError(
            f"{address} is reached from other machines, so a secret is needed: set {SECRET_VARIABLE} in the "
            "environment of server and clients (openssl rand -hex 32), or give --secret-file"
        )
    return secret


def read_secret(file: Path) -> str:
    """Raises ValueError for a file without a secret."""
    secret = _checked(file.read_text(errors="replace"), str(file))
    if secret is None:
        raise ValueError(f"{file} holds no secret, it is empty: write one into it (openssl rand -hex 32), or remove it")
    return secret


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``. A name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def demand_secret(secret: str | None, key: str) -> Middleware:
    """Middleware that answers 401, with a line under ``key``, to whoever does not send the secret."""
    from aiohttp import web  # here, since who only asks for the variable should not wait for it

    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def demand(request: Request, handler: Handler) -> StreamResponse:
        sent = request.headers.get("Authorization")
        if secret is None or hmac.compare_digest((sent or "").encode("utf-8", "surrogateescape"), expected):
            return await handler(request)
        found = "none was sent" if sent is None else "another was sent"
        line = f"this server wants its secret, {found}: set {SECRET_VARIABLE} of the client to the server's"
        return web.json_response({key: line}, status=401, headers={"WWW-Authenticate": "Bearer"})

    return demand


def _given() -> str | None:
    return _checked(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)


def _checked(text: str, where: str) -> str | None:
    secret = text.strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ValueError(f"{where} holds no secret: expected one word of ASCII characters (openssl rand -hex 32)")
    return secret or None
