"""The shop of a running WebShop server: the same environment, asked over HTTP.

The server is WebShop's own web application (web_agent_site/app.py): ``/<session>``, ``/search_results/...``,
``/item_page/...``, ``/item_sub_page/...`` and ``/done/...`` answer HTML, whose visible texts are the page, whose
buttons (class "btn"), links (class "product-link") and radio buttons can be clicked, and whose last page holds the
score. A session whose name holds "fixed" and ends in "_<number>" has the goal of that number in the server's list.

**Not tried against the real server**, which cannot be installed beside this project: its routes and templates were
read, and the tests serve pages of the same structure. The goal is the server's: a task needs its number only
(``metadata["index"]``), and the instruction that the opening page shows counts, since the server draws its price limits
anew each time it starts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import aiohttp
from yarl import URL

from rollout.environments.base import Environment, check_tasks
from rollout.environments.shopping import pages
from rollout.environments.shopping.environment import ShoppingEnvironment, check_reward
from rollout.environments.shopping.html_pages import Target, UnknownPage, read_page
from rollout.environments.shopping.pages import Page
from rollout.retries import pause_before_retry
from rollout.services import LoopSession
from rollout.trajectory import InfrastructureError, Task

INDEX = "index"  # Task.metadata's key of the goal's number
QUERY_FIELD = "search_query"
MAX_QUERY = 400  # characters: the query becomes part of an address


@dataclass(frozen=True, slots=True)
class Server:
    """What all visits of a server share."""

    url: str  # without a slash at its end
    connections: LoopSession
    timeout_s: float
    retries: int
    backoff_s: float

    async def ask(self, url: str, form: dict[str, str] | None = None) -> tuple[str, str]:
        """GET, or POST with ``form``; the address where it ended, and the HTML.

        A visit's state is in its addresses, so that asking again does no harm. Raises InfrastructureError when no
        attempt brings an answer, or the server says that it is wrong.
        """
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(pause_before_retry(attempt, self.backoff_s))
            try:
                status, found, body = await self._ask_once(url, form)
            except TimeoutError:
                failure = f"no answer within {self.timeout_s:g} s"
                continue
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return found, body
            failure = f"status {status}: {' '.join(body[:200].split())}"
            if 400 <= status < 500 and status not in (408, 429):
                break
        raise InfrastructureError(f"the shop's server at {self.url} did not serve {url[:200]}: {failure}")

    async def _ask_once(self, url: str, form: dict[str, str] | None) -> tuple[int, str, str]:
        session, places = self.connections.open()
        method = "GET" if form is None else "POST"
        async with places, asyncio.timeout(self.timeout_s):
            async with session.request(method, URL(url, encoded=True), data=form) as response:
                return response.status, str(response.url), (await response.read()).decode("utf-8", "replace")


class RemoteShopping:
    """Makes one environment per trajectory, each a session of a running WebShop server.

    Args:
        url: the server's address, such as "http://127.0.0.1:3000".
        reward: for buying what is wanted (score 1.0); anything else gives 0.
        timeout_s: seconds for one request, waiting for a place not counted.
        retries: further attempts after the first.
        backoff_s: see ``rollout.retries.pause_before_retry``.
        max_connections: requests under way at once.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        url: str,
        reward: float = 10.0,
        timeout_s: float = 30.0,
        retries: int = 2,
        backoff_s: float = 0.5,
        max_connections: int = 64,
    ) -> None:
        check_reward(reward)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'url is {url!r}; expected "http://host:port"')
        if timeout_s <= 0 or retries < 0 or backoff_s < 0 or max_connections < 1:
            raise ValueError(
                "expected timeout_s > 0, retries >= 0, backoff_s >= 0, max_connections >= 1; found "
                f"{timeout_s}, {retries}, {backoff_s}, {max_connections}"
            )
        self.reward = reward
        self._connections = LoopSession("the shop's server", max_connections)
        self._server = Server(url.rstrip("/"), self._connections, timeout_s, retries, backoff_s)
        self._tried = False

    def __call__(self, task: Task, *, tools_enabled: bool = True) -> Environment:
        """Raises ValueError for a task without the number of a goal."""
        return ShoppingEnvironment(RemoteSession(self._server, goal_number(task)), self.reward, tools_enabled)

    def check(self, tasks: Iterable[Task]) -> None:
        """Raises ValueError for tasks without the number of a goal, before anything is trained on."""
        check_tasks(tasks, goal_number, "goals that cannot be shopped for")

    async def start(self) -> None:
        """Open a session with the first goal, once. Raises InfrastructureError unless a shop answers."""
        if not self._tried:
            await RemoteSession(self._server, 0).open()
            self._tried = True

    async def close(self) -> None:
        """Close the connections; a later use opens new ones."""
        self._tried = False
        await self._connections.close()


def goal_number(task: Task) -> int:
    """Raises ValueError for a task without one."""
    number = task.metadata.get(INDEX)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(
            f"task {task.id}: its metadata has {INDEX} {number!r}; expected the number of a goal in the server's list"
        )
    return number


class RemoteSession:
    """A visit, as ``shop.ShopSession`` is one."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self._home = f"{server.url}/fixed_{uuid.uuid4().hex}_{number}"
        self._targets: dict[str, Target] = {}
        self.page = Page(pages.SEARCH, ())
        self.done = False
        self.score = 0.0

    async def open(self) -> Page:
        """The search page with the server's instruction. Raises InfrastructureError."""
        await self._go(self._home)
        return self.page

    async def act(self, text: str) -> bool:
        """As ``ShopSession.act``. A search posts the form of the search page, from whatever page, since the text
        environment searches from every page too."""
        name, argument = pages.parse_action(text)
        if self.done or argument is None:
            return False
        if name == "search":
            query = clean_query(argument)
            if not query:
                return False
            await self._go(self._home, {QUERY_FIELD: query})
            return True
        target = self._targets.get(argument.lower())
        if name != "click" or target is None:
            return False
        await self._go(target.url, {} if target.posts else None)
        return True

    async def _go(self, url: str, form: dict[str, str] | None = None) -> None:
        found, html = await self._server.ask(url, form)
        try:
            # In a thread: a page with hundreds of options takes some tens of milliseconds.
            read = await asyncio.to_thread(read_page, html, _page_name(found, self._server.url))
        except UnknownPage as error:
            raise InfrastructureError(f"{found[:200]} is no page of WebShop: {error}") from error
        base = self._server.url + "/"
        self._targets = {
            label: Target(urljoin(base, target.url), target.posts) for label, target in read.targets.items()
        }
        self.page, self.done, self.score = read.page, read.score is not None, read.score or 0.0

    async def close(self) -> None:
        """The server forgets no session; there is nothing to close."""


def clean_query(text: str) -> str:
    """A query that can be part of an address: one line, no slash (the server's routes would end there), at most
    ``MAX_QUERY`` characters.

    >>> clean_query("Red/blue  shoes\\x00")
    'red blue shoes'
    """
    readable = "".join(c if c.isprintable() and c != "/" else " " for c in text.lower())
    return " ".join(readable.split())[:MAX_QUERY].rstrip()


_NAMES = {
    "search_results": pages.RESULTS, "item_page": pages.ITEM, "item_sub_page": pages.SUB_PAGE, "done": pages.END,
}  # fmt: skip


def _page_name(url: str, base: str) -> str:
    """By the first part of the path behind the server's address; the search page has the session's name there."""
    path = urlsplit(url).path.removeprefix(urlsplit(base).path).lstrip("/")
    return _NAMES.get(path.partition("/")[0], pages.SEARCH)
