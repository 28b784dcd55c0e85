"""The engine servers of a trainer: which of them serve, which are lost, and how lost servers recover."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rollout.engines.base import Generation
from rollout.engines.server.client import OtherWeights, ServerClient, ServerWeightState
from rollout.engines.server.weights import START
from rollout.trajectory import InfrastructureError, runs_of

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0  # longest pause between two checks of a lost server
WARN_EVERY_S = 60.0
Shapes = dict[str, tuple[int, ...]]
_MASK = (1 << 64) - 1


class ServerPool:
    """The engine servers of one model. ``held`` are the weights that they must have. Belongs to one event loop.

    A server is *lost* if it cannot be reached, its engine has died, or it holds other weights. The pool checks a lost
    server repeatedly. The server serves again once it holds the right weights, or has loaded them from the sender's
    files.
    """

    def __init__(
        self, servers: Sequence[ServerClient], model: str, max_length: int, expected: Shapes, tied: set[str]
    ) -> None:
        """``expected``: names and shapes of the model's weights. ``tied``: names that a server may lack."""
        self.servers, self.held = list(servers), ServerWeightState(START, 0)
        self._model, self._max_length, self._expected, self._tied = model, max_length, expected, tied
        self._affinity = PrefixAffinity()
        self._searches: dict[ServerClient, asyncio.Task[None]] = {}
        self._foreign = ""  # message if a server holds the weights of another run
        self._told = float("-inf")
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()  # no push is in progress
        self._settled.set()
        self._whole = {self.held.version}  # versions of complete pushes, and of the folder

    # ------------------------------------------------------------------ pushes
    def begin_push(self) -> None:
        """Begin a weight push, which lasts until `end_push`.

        Requests still ask for the old weights. If a server already has the new ones, its requests wait for the end."""
        self._settled.clear()
        self.held = replace(self.held, paths=())  # the sender removes its old files before it writes new ones

    def end_push(self) -> None:
        self._settled.set()
        self._wake()

    async def moved_on(self, held: ServerWeightState) -> bool:
        """Return whether a newer weight push than ``held`` has ended. Waits for a push in progress."""
        await self._settled.wait()
        return self.held.tag != held.tag

    async def accept(self, generation: Generation, asked: ServerWeightState) -> None:
        """Check that only weights of complete pushes sampled ``generation``. Waits for the end of a push in progress.

        ``asked``: the weights that the request named. Raises OtherWeights."""
        count = len(generation.token_ids)
        versions = {version for version, _ in runs_of(generation.policy_version, generation.version_runs, count)}
        if not versions <= self._whole:
            await self._settled.wait()
        if not versions <= self._whole:
            raise OtherWeights(f"it answered from an incomplete push, with versions {sorted(versions)}")
        if generation.policy_version < asked.version and asked.tag == self.held.tag:
            raise OtherWeights(f"it answered from version {generation.policy_version}, not {asked.version}")

    def adopt(self, held: ServerWeightState) -> None:
        """Send requests only to servers that hold the weights ``held``, from now on."""
        self.held = held
        self._whole.add(held.version)
        self._affinity.clear()
        for server, task in self._searches.items():  # they wait for the old weights
            task.cancel()
            if server.lost is not None:
                self._searches[server] = asyncio.ensure_future(self._search(server))

    async def close(self) -> None:
        tasks = list(self._searches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ which server
    @property
    def serving(self) -> list[ServerClient]:
        return [server for server in self.servers if server.lost is None]

    def remember_cached(self, ids: Sequence[int], version: int, server: ServerClient) -> None:
        """Remember that the prefix cache of ``server`` holds the token ``ids``, so that later requests with this prefix
        go there. Does nothing if a weight push has emptied the cache since."""
        if version == self.held.version:
            self._affinity.remember(ids, server)

    def choose(self, ids: Sequence[int]) -> ServerClient | None:
        """Return the engine server that sampled the beginning of the token ``ids``, or the least busy one (None: no
        server serves)."""
        serving = self.serving
        owner = self._affinity.find(ids) if len(serving) > 1 else None
        return owner if owner in serving else min(serving, key=lambda s: s.in_flight, default=None)

    async def wait(self, until: float) -> None:
        """Wait until the state of an engine server changes. Raises InfrastructureError at the time ``until``,
        ValueError if no server will serve."""
        if self._foreign and self.held.tag == START:
            raise ValueError(self._foreign)
        left = until - time.monotonic()
        if left <= 0:
            raise InfrastructureError(self.no_server_message())
        if time.monotonic() - self._told >= WARN_EVERY_S:
            self._told = time.monotonic()
            logger.warning("%s; requests wait up to %.0f s", self.no_server_message(), left)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), left)

    def no_server_message(self) -> str:
        """Return the error message that no engine server serves, with each server's reason."""
        return "no engine server serves: " + "; ".join(f"{s.url}: {s.lost or 'ready'}" for s in self.servers)

    def lose(self, server: ServerClient, why: str) -> None:
        """Send no more requests to an engine server, and check the server until it is back."""
        if server.lost is None:
            logger.warning("engine server %s is lost (%s); its requests go to other servers, or wait", server, why)
        server.lost = why
        if server not in self._searches or self._searches[server].done():
            self._searches[server] = asyncio.ensure_future(self._search(server))

    async def _search(self, server: ServerClient) -> None:
        pause = 0.1
        while True:
            await self._settled.wait()
            try:
                await self._recover(server)
            except (InfrastructureError, ValueError) as error:
                server.lost = str(error)
                self._wake()
            else:
                server.lost = None
                logger.warning("engine server %s is back, with version %d", server, self.held.version)
                self._wake()
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _recover(self, server: ServerClient) -> None:
        """Let a lost engine server load the right weights, unless it has them. Raises the reason if it cannot serve."""
        health, held = await self.check(server), self.held
        if health["weights"] == held.tag and not health["refusal"]:
            return
        if held.tag == START:
            self._foreign = (
                f"{server} holds the weights of another run (version {health['version']}), and this run has pushed "
                "none; restart the server, or push (callbacks.training.weight_sync.WeightSync)"
            )
            raise ValueError(self._foreign)
        if health["version"] > held.version:
            found = health["version"]
            raise InfrastructureError(f"it holds version {found}, of a push that is unknown here, or of another run")
        order = {"tag": held.tag, "version": held.version, "replaces": health["weights"]}
        order["between_steps"] = True  # its requests in flight are older than the push that it missed
        if held.paths:
            await server.post("/weights/load", {**order, "paths": list(held.paths)})
            return
        holds = health["refusal"] or f"it holds version {health['version']}"
        raise InfrastructureError(f"{holds}; the files of version {held.version} are removed; it gets the next push")

    # ------------------------------------------------------------------ what they serve
    async def reachable(self) -> list[ServerClient]:
        """Return the servers that answer, with any weights. Raises InfrastructureError if none does."""
        answers = await asyncio.gather(*map(self.check, self.servers), return_exceptions=True)
        for server, answer in zip(self.servers, answers, strict=True):
            if isinstance(answer, (InfrastructureError, ValueError)):
                self.lose(server, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        reachable = [s for s, answer in zip(self.servers, answers, strict=True) if isinstance(answer, dict)]
        if not reachable:
            raise InfrastructureError(self.no_server_message())
        return reachable

    async def check(self, server: ServerClient) -> dict[str, Any]:
        """Return a server's health, after checking once that it serves the expected model."""
        health = await server.health()
        if "instance" not in health:
            raise ValueError(f"{server} is not an engine server (no instance in /health); start one with `make engine`")
        if health.get("instance") == server.checked:
            return health
        if health["max_length"] < self._max_length:
            raise ValueError(
                f"{server} takes {health['max_length']} tokens, not {self._max_length}; start it with that max_length, "
                "or lower this engine's"
            )
        answer = await server.shapes()
        found = {name: tuple(shape) for name, shape in answer["weights"].items()}
        shapes = ((name, found.get(name), self._expected.get(name)) for name in sorted(self._expected.keys() | found))
        optional = self._tied & set(answer["tied"])
        wrong = [(name, there, here) for name, there, here in shapes if there != here and name not in optional]
        if wrong:
            name, there, here = wrong[0]
            raise ValueError(
                f"{server} serves {health['model']}, another model than {self._model}: {len(wrong)} weights differ, "
                f"first {name}: {there or 'missing'} there, {here or 'missing'} here; start it on a model of the same "
                "configuration"
            )
        server.checked, server.dtype = health["instance"], health.get("dtype")
        return health

    def _wake(self) -> None:
        """Let all requests that wait for an engine server check again."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()


class PrefixAffinity:
    """Finds the server that sampled the beginning of a sequence, so that its prefix cache serves the next turn.

    Prompts alone are not remembered, because a group's samples would then all go to one server. A lookup hashes the
    given ids once (about 1 ms for 6,000).
    """

    def __init__(self, most: int = 100_000) -> None:
        """``most``: number of sequences to remember. The least recently used is forgotten first."""
        self._most = most
        self._owners: OrderedDict[int, Any] = OrderedDict()

    def remember(self, token_ids: Sequence[int], owner: Any) -> None:
        key = _prefix_hashes(token_ids)[-1]
        self._owners[key] = owner
        self._owners.move_to_end(key)
        if len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def find(self, token_ids: Sequence[int]) -> Any | None:
        """Return the server of the longest remembered prefix of ``token_ids``, or None."""
        for key in reversed(_prefix_hashes(token_ids)):
            if key in self._owners:
                return self._owners[key]
        return None

    def clear(self) -> None:
        self._owners.clear()


def _prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """Return a 64-bit hash of each prefix of the token ids, the shortest first."""
    return list(accumulate(token_ids, lambda h, t: ((h ^ t) * 0x9E3779B97F4A7C15 + 1) & _MASK, initial=1))[1:]
