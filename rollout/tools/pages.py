"""Fetching web pages whose addresses come from strangers."""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rollout.services import LoopSession
from rollout.tools.html_text import html_to_text

_TEXT = frozenset({"text/html", "application/xhtml+xml", "text/plain", "application/xml", "text/xml"})
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([a-zA-Z0-9_:-]{2,30})""", re.IGNORECASE)
# what pages are written in; others of Python's codecs (punycode) take quadratic time
_CHARSETS = ("utf", "iso8859", "cp", "gb", "hz", "big5", "euc", "shift", "iso2022", "koi8", "ascii", "tis", "mac")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all that IANA gives out as public addresses of IPv6
_FOR_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # RFC 6890; Python takes some of it for global


@dataclass(frozen=True, slots=True)
class Page:
    url: str
    text: str  # "" where it could not be read
    error: str | None = None  # why not


class PageFetcher:
    """Pages as text: HTML and plain text. PDF files are not read (no library for them is among the dependencies; the
    paper's evaluation takes their first 600 words), and the page's ``error`` says so.

    Only http and https, and only addresses of the public internet: each connection is checked at the moment it is made,
    with the address that it really goes to, so neither a name that resolves to the own network nor a redirect gets
    past. Nothing is remembered between pages (no cookies).

    Args:
        timeout: seconds for a page, redirects included, waiting for a free place not.
        max_characters: of a page's text.
        max_bytes: of a page that are downloaded.
        concurrency: pages under way at once.
        allow_private_addresses: fetch from loopback and the own network too. For tests, and for a mirror of one's own.
        user_agent: what the servers are told; many refuse unknown ones.
    """

    def __init__(
        self,
        timeout: float = 20.0,
        max_characters: int = 20_000,
        max_bytes: int = 2_000_000,
        concurrency: int = 32,
        allow_private_addresses: bool = False,
        user_agent: str = "Mozilla/5.0 (compatible; CompactAgents)",
    ) -> None:
        if timeout <= 0 or min(max_characters, max_bytes, concurrency) < 1:
            raise ValueError(
                "expected timeout > 0, max_characters, max_bytes and concurrency >= 1; found "
                f"{timeout}, {max_characters}, {max_bytes}, {concurrency}"
            )
        self.timeout, self.max_characters, self.max_bytes = timeout, max_characters, max_bytes
        self._headers = {"User-Agent": user_agent, "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9"}
        make_socket = _any_socket if allow_private_addresses else public_socket
        self._session = LoopSession(
            "PageFetcher", concurrency, lambda: aiohttp.TCPConnector(limit=0, socket_factory=make_socket)
        )

    async def fetch(self, url: str) -> Page:
        """A page that cannot be read is an ordinary thing: it comes back with ``error``, nothing is raised."""
        try:
            if urlsplit(url).scheme not in ("http", "https"):
                return Page(url, "", "not an http or https address")
            session, places = self._session.open()
            async with places, asyncio.timeout(self.timeout):
                return await self._read(session, url)
        except TimeoutError:
            return Page(url, "", f"no page within {self.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            return Page(url, "", str(_cause(error)))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: what is no address at all
            return Page(url, "", f"{type(error).__name__}: {error}"[:300])

    async def _read(self, session: aiohttp.ClientSession, url: str) -> Page:
        async with session.get(url, headers=self._headers, max_redirects=5) as response:
            if response.status != 200:
                return Page(url, "", f"status {response.status}")
            kind = response.content_type
            if kind == "application/pdf":
                return Page(url, "", "a PDF file: not read, there is no library for it here")
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
    text = body.decode(_known(charset), "replace").removeprefix("\ufeff")
    return text.strip() if kind == "text/plain" else html_to_text(text)


def _known(charset: str | None) -> str:
    try:
        name = codecs.lookup(charset or "utf-8").name
    except LookupError:
        return "utf-8"
    return name if name.startswith(_CHARSETS) else "utf-8"


# -- addresses ------------------------------------------------------------------------------------------------------


class RefusedAddress(OSError):
    """The address is not one of the public internet."""


def is_public(address: str) -> bool:
    """Whether an IP address, and any IPv4 address inside it, is globally routable (and not multicast). Of IPv6 only
    2000::/3 counts, besides two ways to write a public IPv4 address: mapped (::ffff:0:0/96) and NAT64 (64:ff9b::/96).

    >>> is_public("93.184.216.34"), is_public("127.0.0.1"), is_public("::ffff:10.0.0.1")
    (True, False, False)
    """
    try:
        outer = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(_is_routable(inner) for inner in _with_embedded(outer))


def _is_routable(address: Any) -> bool:
    right_range = address not in _FOR_PROTOCOLS if address.version == 4 else address in _GLOBAL_UNICAST
    return right_range and address.is_global and not address.is_multicast


def _with_embedded(address: Any) -> Iterator[Any]:
    """The address, or the IPv4 address that it stands for (mapped, NAT64), and those it tunnels to."""
    if address.version == 4:
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    if address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo


def public_socket(target: tuple[Any, ...]) -> socket.socket:
    """A socket for a connection to ``target`` (family, type, protocol, name, address); RefusedAddress if that is not
    public. Called by aiohttp for every connection, after names are resolved."""
    host = target[4][0]
    if not is_public(host):
        raise RefusedAddress(f"refused: {host} is not an address of the public internet")
    return _any_socket(target)


def _any_socket(target: tuple[Any, ...]) -> socket.socket:
    return socket.socket(target[0], target[1], target[2])


def _cause(error: BaseException) -> BaseException:
    """The refusal behind an error of a connection, if that is what it was."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RefusedAddress):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
