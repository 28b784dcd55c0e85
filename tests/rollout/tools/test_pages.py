"""Fetching pages from a local server, and what must not be fetched."""

import asyncio
import gzip
import re
import time
import tracemalloc

import pytest
from aiohttp import web

from rollout.tools.web.page_fetcher import PageFetcher, html_to_text, is_public
from tests.rollout.serving import response, site


def fetch(page, **options):
    """The page "/p" of a server that has it."""

    async def main():
        async with site(page if isinstance(page, dict) else {"/p": page}) as (url, _):
            fetcher = PageFetcher(**({"allow_private_addresses": True} | options))
            try:
                return await fetcher.fetch(url + "/p")
            finally:
                await fetcher.close()

    return asyncio.run(main())


def test_html_and_plain_text():
    page = fetch(response("<p>one<script>x</script> &amp; two</p>", charset="utf-8"))
    assert (page.text, page.error) == ("one & two", None)
    assert fetch(response("a < b\n  <p>", "text/plain")).text == "a < b\n  <p>"
    assert fetch(response("<p>" + "x" * 50), max_characters=7).text == "x" * 7


@pytest.mark.parametrize(
    ("body", "header", "text"),
    [
        ("<p>é".encode("latin-1"), "iso-8859-1", "é"),
        ("<meta charset=gb2312><p>红楼梦".encode("gb2312"), None, "红楼梦"),
        ("\ufeff<p>é".encode(), None, "é"),
        (b"<p>caf\xe9", None, "caf\ufffd"),
        ("<p>é".encode(), "no-such-charset", "é"),
    ],
)
def test_charsets(body, header, text):
    assert fetch(response(body, charset=header)).text == text


ARTICLE = "<p>The harbour was dug in 1804 by the people of the town, who paid for it themselves. " * 5


def test_of_a_page_the_article_is_read():
    menu = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/x'>About us</a></li></ul></nav>"
    text = html_to_text(f"<html><head><title>T</title></head><body>{menu}<article>{ARTICLE}</article></body></html>")
    assert "The harbour was dug in 1804" in text and "About us" not in text
    assert html_to_text("<table><tr><td>a</td><td>b &lt; c</td></tr></table>").split() == "| a | b < c |".split()
    assert html_to_text("") == html_to_text("<p") == html_to_text("<!--") == ""


def seconds_of(part, size):
    """Of processor time, which others on the machine do not take."""
    began = time.process_time()
    html_to_text(part * (size // len(part)))
    return time.process_time() - began


@pytest.fixture(scope="module")
def ordinary():
    """What pages of paragraphs take, by size."""
    html_to_text(ARTICLE)  # which imports
    return {size: max(seconds_of(ARTICLE, size) for _ in range(3)) for size in (60_000, 600_000)}


@pytest.mark.parametrize(
    "part",
    ["<", "<a ", "<a x='", "<!--", "<![", "</a ", "<script>", "&#", "<div>", "<b>x", "x<br>", "<table><tr><td>",
     "<p>some words</p>", "<a href='http://e.org'>x</a>", "<ul><li>x", "\x00<p>"],
)  # fmt: skip
def test_hostile_pages_take_about_as_long_as_others(part, ordinary):
    """With and without a search for the article, which takes quadratic time. Measured: at most 9 times as long."""
    for size, seconds in ordinary.items():
        assert seconds_of(part, size) < 60 * seconds, size


def test_in_a_page_that_is_too_long_no_article_is_searched(monkeypatch):
    searched = []
    monkeypatch.setattr("trafilatura.extract", lambda source, **_: searched.append(len(source)))
    for size in (60_000, 600_000):
        assert html_to_text("<p>" + "word " * (size // 5)).startswith("word word")
    assert len(searched) == 1 and searched[0] < 100_000


@pytest.mark.parametrize(
    ("page", "error"),
    [
        (web.Response(status=404, text="no"), "status 404"),
        (response(b"%PDF-1.7", "application/pdf"), r"not a text \(application/pdf\)"),
        (response(b"\x89PNG", "image/png"), r"not a text \(image/png\)"),
        (response("<p></p>"), "no text in it"),
    ],
)
def test_pages_that_are_no_text(page, error):
    page = fetch(page)
    assert page.text == "" and re.fullmatch(error, page.error)


def test_a_page_without_end_is_cut_and_a_silent_one_given_up():
    async def endless(request):
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 10_000)

    async def silent(request):
        await asyncio.Event().wait()

    assert fetch(endless, max_bytes=100_000, max_characters=10**9).text == "x" * 100_000
    assert fetch(silent, timeout=0.1).error == "no page within 0.1 s"


def test_a_compressed_bomb_is_not_unpacked():
    bomb = gzip.compress(b"x" * 100_000_000, compresslevel=1)
    tracemalloc.start()
    try:
        page = fetch(response(bomb, "text/plain", headers={"Content-Encoding": "gzip"}), max_bytes=50_000)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert page.text == "x" * 20_000


def test_addresses_that_are_none():
    async def main():
        fetcher = PageFetcher(allow_private_addresses=True)
        addresses = ("file:///etc/passwd", "ftp://e.org/x", "data:text/html,x", "javascript:x", "/etc/passwd", "",
                     "http://", "http://[", "http://a b/", "http://127.0.0.1:1/", "http://127.0.0.1:99999/",
                     "http://" + "a" * 300 + ".org/", "http://\ud83d.org/", "http://no-such-host.invalid/")  # fmt: skip
        pages = await asyncio.gather(*(fetcher.fetch(address) for address in addresses))
        await fetcher.close()
        return pages

    pages = asyncio.run(main())
    assert [page.text for page in pages] == [""] * len(pages) and all(page.error for page in pages)
    assert {page.error for page in pages[:6]} == {"not an http or https address"}


def test_redirects_are_followed_but_not_for_ever_nor_to_files():
    def to(place):
        async def redirect(request):
            return web.Response(status=302, headers={"Location": place})

        return redirect

    pages = {"/q": response("there", "text/plain"), "/loop": to("/loop")}
    assert fetch(pages | {"/p": to("/q")}).text == "there"
    assert "TooManyRedirects" in fetch(pages | {"/p": to("/loop")}).error
    assert "NonHttpUrlRedirect" in fetch(pages | {"/p": to("file:///etc/passwd")}).error


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "[::1]",
        "[::ffff:7f00:1]",
        "user:pass@127.0.0.1",
    ],
)
def test_the_own_machine_is_not_asked_by_default(host):
    async def main():
        async with site({"/p": response("secret")}) as (url, asked):
            fetcher = PageFetcher()
            page = await fetcher.fetch(f"http://{host}:{url.rpartition(':')[2]}/p")
            await fetcher.close()
            return page, asked

    page, asked = asyncio.run(main())
    assert page.text == "" and asked == [] and page.error


def test_a_redirect_into_the_own_network_is_refused(monkeypatch):
    """127.0.0.2 plays the public server here."""
    monkeypatch.setattr("rollout.tools.web.page_fetcher.is_public", lambda address: address == "127.0.0.2")

    async def main():
        async with site({"/secret": response("secret")}) as (inside, asked):
            away = web.Response(status=302, headers={"Location": inside + "/secret"})
            pages = {"/ok": response("public", "text/plain"), "/p": away}
            async with site(pages, "127.0.0.2") as (outside, _):
                fetcher = PageFetcher()
                found = [await fetcher.fetch(outside + path) for path in ("/ok", "/p")]
                await fetcher.close()
                return found, asked

    (ok, refused), asked = asyncio.run(main())
    assert ok.text == "public" and asked == []
    assert refused.text == "" and "refused: 127.0.0.1 is not an address of the public internet" in refused.error


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", False),
        ("::ffff:0:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("2001:db8::1", False),
        ("3fff:ffff:ffff::1", True),
        ("192.0.0.9", False),
        ("::ffff:192.0.0.9", False),
        ("localhost", False),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


def test_few_pages_at_once():
    running, most, three = 0, 0, asyncio.Event()  # the first three wait for each other

    async def page(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            three.set()
        await three.wait()
        running -= 1
        return response("x", "text/plain")

    async def main():
        async with site({"/p": page}) as (url, _):
            fetcher = PageFetcher(concurrency=3, allow_private_addresses=True)
            pages = await asyncio.gather(*(fetcher.fetch(url + "/p") for _ in range(9)))
            await fetcher.close()
            return [page.text for page in pages]

    assert asyncio.run(main()) == ["x"] * 9 and most == 3
