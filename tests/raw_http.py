"""Requests as bytes, which no client library would send, and how the servers must answer them."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib

GOOD = b'{"queries": ["a"]}'


def request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        headers = (*headers, f"Content-Length: {len(body)}")
    head = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def unreadable(path: str) -> list[tuple[bytes, int, str]]:
    """(request, status, part of the error) for each request; ``path`` takes a JSON body by POST."""
    chunked, large = "Transfer-Encoding: chunked", "bytes|Maximum request body size"
    return [
        (request(path, GOOD, "Content-Encoding: gzip"), 400, "content-encoding: gzip; expected HTTP/1.1 with"),
        (request(path, GOOD, "Content-Encoding: deflate"), 400, "cannot be read: deflate"),
        (request(path, zlib.compress(GOOD)[:-8], "Content-Encoding: deflate"), 400, "cannot be read: deflate"),
        (request(path, GOOD, "Content-Encoding: br"), 400, "brotli|content-encoding: br"),
        (request(path, GOOD, "Content-Encoding: zstd"), 400, "zstd"),
        (request(path, b"\x00\x01", "Content-Encoding: xz"), 0, "the body"),
        (request(path, gzip.compress(b" " * (32 << 20)), "Content-Encoding: gzip"), 413, large),
        (request(path, GOOD, "Content-Length: 3", "Content-Length: 18"), 400, "Duplicate Content-Length"),
        (request(path, GOOD, "Content-Length: abc"), 400, "Content-Length: abc"),
        (request(path, GOOD, "Content-Length: -1"), 400, "Content-Length: -1"),
        (request(path, b"zz\r\n{}\r\n0\r\n\r\n", chunked), 400, "chunk size"),
        (request(path, b"2\r\n{}\r\nzz\r\n\r\n", chunked), 400, "chunk size"),
        (request(path, b"{}", "Transfer-Encoding: foo"), 400, "Transfer-Encoding"),
        (request(path, b"2\r\n{}\r\n0\r\n\r\n", chunked, "Content-Length: 12"), 400, "Content-Length can't be present"),
        (request(path, b'{"queries": ["\xff"]}'), 0, "the body"),
        (request(path, b"\xff\xfe"), 0, "the body"),
        (request(path, b""), 0, "the body"),
        (request(path, b"[" * 500_000), 0, "recursion"),
        (request(path, b'{"a":' * 100_000), 0, "recursion"),
        (request(path, b'{"queries": 1' + b"0" * 10_000 + b"}"), 0, "range|limit"),
        (request(path, b"[" + b" " * (20 << 20) + b"]"), 413, large),
        (request(path, b"", method="DELETE"), 405, f"DELETE {path}: .*; expected .*POST {path}"),
        (request(path, b"", method="GET"), 405, f"GET {path}: .*; expected .*POST {path}"),
        (request(path, b"", method="BREW"), 400, "Invalid method"),
        (request("/nope", b"{}"), 404, "POST /nope: .*; expected .*GET /health"),
        (request("/%zz\x7f", b"{}"), 400, "Invalid char"),
        (request(path, GOOD, "Expect: cake"), 417, "Expect: cake"),
        (request(path, GOOD, "Foo bar"), 400, "header"),
        (request(path, GOOD, "Foo: " + "x" * 20_000), 400, "8190"),
        (request(f"{path}?{'x' * 20_000}", GOOD), 400, "8190"),
        (b"hello\r\n\r\n", 400, "Invalid method"),
        (f"POST {path} HTTP/9.9\r\nHost: x\r\n\r\n".encode(), 400, "HTTP version"),
        (bytes.fromhex("16030100a5010000a10303") + bytes(150), 400, "HTTPS"),
    ]  # fmt: skip


async def ask(host: str, port: int, sent: bytes) -> tuple[int, dict]:
    """Send bytes and return the status and the error, which must be one line of JSON."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"application/json" in head and len(body.splitlines()) == 1, (sent[:100], head, body[:300])
    return int(head.split()[1]), json.loads(body)


async def check_unreadable(host: str, port: int, path: str, key: str, wrong_body: int) -> None:
    """``key``: of errors. ``wrong_body``: the server's status for a body that is not JSON."""
    for sent, status, said in unreadable(path):
        found, answer = await ask(host, port, sent)
        assert found == (status or wrong_body) and list(answer) == [key], (sent[:100], found, answer)
        assert re.search(said, answer[key]) and len(answer[key]) < 500 and "\n" not in answer[key], (sent[:100], answer)
