"""Fetcher of web pages from untrusted addresses: text only, bounded, only from the public internet."""

from __future__ import annotations

import asyncio
import codecs
import errno
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from common.ranges import PositiveFloat, PositiveInt
from common.sessions import LoopSession

_HEADERS = {  # many servers refuse unknown agents
    "User-Agent": "Mozilla/5.0 (compatible; CompactAgents)",
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9",
}
_TEXT = frozenset({"text/html", "application/xhtml+xml", "text/plain", "application/xml", "text/xml"})
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([a-zA-Z0-9_:-]{2,30})""", re.IGNORECASE)
# encodings of web pages; other Python codecs (punycode) take quadratic time
_CHARSETS = ("utf", "iso8859", "cp", "gb", "hz", "big5", "euc", "shift", "iso2022", "koi8", "ascii", "tis", "mac")
_MOST_EXTRACTED = 400_000  # characters; finding the article in a hostile page of 1 MB takes 15 s, all its text 0.8 s
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # IANA's public addresses of IPv6
_FOR_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # RFC 6890; Python counts some of it as global


@dataclass(frozen=True, slots=True)
class Page:
    url: str
    text: str  # "" where it could not be read
    error: str | None = None  # why not


class PageFetcher:
    """Fetches web pages as text: the article of an HTML page, or plain text. PDF files are not read; the page's
    ``error`` says so (the paper's evaluation takes their first 600 words).

    Fetches only http and https, and only addresses of the public internet. Each connection is checked when it is made,
    by its real address, so neither a name that resolves to a private address nor a redirect gets past. Keeps no
    cookies.

    Args:
        timeout: seconds for a page, redirects included; waiting for a free connection does not count.
        max_characters: limit of a page's text.
        max_bytes: limit of a page's download.
        concurrency: pages in flight at once.
        allow_private_addresses: also fetch from loopback and private networks, for tests and for your own mirror.
    """

    def __init__(
        self,
        timeout: PositiveFloat = 20.0,
        max_characters: PositiveInt = 20_000,
        max_bytes: PositiveInt = 2_000_000,
        concurrency: PositiveInt = 32,
        allow_private_addresses: bool = False,
    ) -> None:
        self.timeout, self.max_characters, self.max_bytes = timeout, max_characters, max_bytes
        make_socket = None if allow_private_addresses else public_socket
        self._session = LoopSession(
            "PageFetcher", concurrency, lambda: aiohttp.TCPConnector(limit=0, socket_factory=make_socket)
        )

    async def fetch(self, url: str) -> Page:
        """Return the page at ``url`` as text. A page that cannot be read comes back with ``error``; nothing is
        raised."""
        try:
            if urlsplit(url).scheme not in ("http", "https"):
                return Page(url, "", "not an http or https address")
            session, slots = self._session.open()
            async with slots, asyncio.timeout(self.timeout):
                return await self._read(session, url)
        except TimeoutError:
            return Page(url, "", f"no page within {self.timeout:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: not an address
            return Page(url, "", f"{type(error).__name__}: {error}"[:300])

    async def _read(self, session: aiohttp.ClientSession, url: str) -> Page:
        async with session.get(url, headers=_HEADERS, max_redirects=5) as response:
            if response.status != 200:
                return Page(url, "", f"status {response.status}")
            kind = response.content_type
            if kind not in _TEXT:
                return Page(url, "", f"not a text ({kind})")
            content = bytearray()
            async for part in response.content.iter_chunked(65_536):
                content += part
                if len(content) >= self.max_bytes:
                    break
            charset = response.charset
        body = bytes(content[: self.max_bytes])
        text = await asyncio.to_thread(_text_of, body, charset, kind)  # a large page would hold up the event loop
        return Page(url, text[: self.max_characters], None if text else "no text in it")

    async def close(self) -> None:
        await self._session.close()


def _text_of(body: bytes, charset: str | None, kind: str) -> str:
    if charset is None and (declared := _META_CHARSET.search(body[:4096])):
        charset = declared[1].decode("ascii")
    try:
        name = codecs.lookup(charset or "utf-8").name
    except LookupError:
        name = "utf-8"
    text = body.decode(name if name.startswith(_CHARSETS) else "utf-8", "replace").removeprefix("\ufeff")
    return text.strip() if kind == "text/plain" else html_to_text(text)


def html_to_text(source: str) -> str:
    """Return the main text of an HTML page, without navigation and advertisements; all of its text if no article is
    found."""
    import trafilatura  # with its parsers 0.4 s, and only searches that browse need it

    if "html" not in source[:50].lower():
        source = f"<html>{source}"  # trafilatura takes no fragments
    article = None
    if len(source) <= _MOST_EXTRACTED:
        article = trafilatura.extract(source, fast=True, favor_recall=True, include_comments=False)
    return article or trafilatura.html2txt(source)


# -- addresses ------------------------------------------------------------------------------------------------------


def is_public(address: str) -> bool:
    """Return whether an IP address is globally routable and not multicast. Only 2000::/3 of IPv6 counts, without the
    ranges that tunnel to IPv4 addresses; an IPv4 address written as IPv6 (::ffff:0:0/96) counts as IPv4.

    >>> is_public("93.184.216.34"), is_public("127.0.0.1"), is_public("::ffff:10.0.0.1")
    (True, False, False)
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            tunnel = found.sixtofour is not None or found.teredo is not None
            return found in _GLOBAL_UNICAST and not tunnel and found.is_global and not found.is_multicast
        found = found.ipv4_mapped
    return found not in _FOR_PROTOCOLS and found.is_global and not found.is_multicast


def public_socket(target: tuple[Any, ...]) -> socket.socket:
    """Return a new socket for a connection to ``target`` (family, type, protocol, name, address). aiohttp calls it for
    every connection, after names are resolved. Raises PermissionError if the address is not public."""
    host = target[4][0]
    if not is_public(host):
        raise PermissionError(errno.EACCES, f"refused: {host} is not an address of the public internet")
    return socket.socket(*target[:3])
