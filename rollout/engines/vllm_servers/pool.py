"""The servers of a trainer: which of them serve, which are lost, and how lost servers recover."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn

from common.ranks import rank
from rollout.engines.vllm_servers.adapter import adapters_of, load_adapter
from rollout.engines.vllm_servers.client import (
    CHECK_S,
    START,
    UNCHECKED,
    Answer,
    Labels,
    OtherWeights,
    ServerClient,
    version_of,
)
from rollout.engines.vllm_servers.flags import FILES, MAX_LOGPROBS
from rollout.engines.vllm_servers.transfer import load_files, require_files
from rollout.engines.weights.files import SHARED_MEMORY, digest_of_folder, new_file
from rollout.trajectory import InfrastructureError

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0  # longest pause between two checks of a lost server
CHECK_LOST_S = 3.0  # that a push waits for a lost server
WARN_EVERY_S = 60.0
ROUTER_PAUSE_S = 0.5
WATCH_S = 5.0  # between looks whether servers hold the right weights
EXPECTED = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_logprobs": MAX_LOGPROBS}
Shapes = dict[str, tuple[int, ...]]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Identifies the weights that all servers must hold."""

    label: str  # of the push that brought them
    paths: tuple[str, ...] = ()  # the files of the push, while the sender keeps them
    adapter: str | None = None  # folder of the LoRA adapter, if the push brought one; its name is the label

    @property
    def version(self) -> int:
        return version_of(self.label)

    @property
    def name(self) -> str | None:
        """Name of the adapter, for requests."""
        return self.label if self.adapter is not None else None


class ServerPool:
    """The servers of one model. ``held`` are the weights that they must have. Belongs to one event loop.

    A server is *lost* if it cannot be reached, its engine has died, or it holds other weights. The pool checks a lost
    server repeatedly. The server serves again once it holds the right weights, or has loaded them from the sender's
    files.
    """

    def __init__(
        self,
        servers: Sequence[ServerClient],
        model: str,
        max_length: int,
        expected: Shapes,
        tied: set[str],
        backend: str,
        adapters: bool,
        labels: Labels,
    ) -> None:
        """
        Args:
            expected: names and shapes of the model's weights.
            tied: names that a server may lack.
            backend: weight transfer backend that the servers must have.
            adapters: whether the servers must take LoRA adapters.
            labels: of this trainer's pushes.
        """
        self.servers, self.held = list(servers), HeldWeights(START)
        self._model, self._max_length, self._expected, self._tied = model, max_length, expected, tied
        self._backend, self._adapters, self._labels = backend, adapters, labels
        self._base: str | None = None  # digest of the policy's base
        self._refused: dict[str, str] = {}  # by instance: why it does not fit, as long as it runs
        self.sends = True  # False: another rank pushes, and loads weights into servers that are back
        self._affinity = PrefixAffinity()
        self._searches: dict[ServerClient, asyncio.Task[None]] = {}
        self._foreign: dict[ServerClient, str] = {}  # servers with weights of another run -> message
        self._watch = asyncio.ensure_future(self._keep_watch())
        self._told = float("-inf")
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()  # no push is in progress
        self._settled.set()
        self._order = {START: 0}  # labels of complete pushes, and of the folder, in their order

    # ------------------------------------------------------------------ pushes
    async def begin_push(self) -> None:
        """Begin a weight push, which lasts until `end_push`. An answer from new weights waits for the end. Recoveries
        of lost servers are broken off, so that only the push changes weights."""
        self._settled.clear()
        for server in self.servers:
            server.updating = True
        await self._end_searches()
        self.held = replace(self.held, paths=())  # the sender removes its old files before it writes new ones

    def end_push(self) -> None:
        for server in self.servers:
            server.updating = False
            if server.lost is not None:
                self.lose(server, server.lost)
        self._settled.set()
        self._wake()

    async def accept(self, answer: Answer, asked: HeldWeights) -> None:
        """Check that only weights of complete pushes, none older than ``asked``, sampled an answer. Waits for the end
        of a push in progress. Raises OtherWeights."""
        if not all(label in self._order for label in answer.labels):
            await self._settled.wait()
        oldest = self._order[asked.label]
        wrong = [label for label in answer.labels if self._order.get(label, -1) < oldest]
        if wrong:
            raise OtherWeights(f"it answered from weights {wrong[0]}; expected {asked.label} or newer ones")

    def adopt(self, held: HeldWeights) -> None:
        """Send requests only to servers that hold the weights ``held``, from now on."""
        self.held = held
        self._order.setdefault(held.label, len(self._order))
        self._affinity.clear()

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._end_searches()

    async def _end_searches(self) -> None:
        tasks = list(self._searches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._searches.clear()

    # ------------------------------------------------------------------ which server
    @property
    def serving(self) -> list[ServerClient]:
        return [server for server in self.servers if server.lost is None]

    @property
    def vocab_size(self) -> int | None:
        return next((server.facts["vocab_size"] for server in self.servers if server.facts), None)

    def remember_cached(self, ids: Sequence[int], labels: Sequence[str], server: ServerClient) -> None:
        """Remember that the prefix cache of ``server`` holds the token ``ids``, so that later requests with this prefix
        go there. Does nothing if a weight push has emptied the cache since."""
        if labels and labels[-1] == self.held.label:
            self._affinity.remember(ids, server)

    def choose(self, ids: Sequence[int]) -> ServerClient | None:
        """Return the server that sampled the beginning of the token ``ids``, or the least busy one (None: no server
        serves)."""
        serving = self.serving
        owner = self._affinity.find(ids) if len(serving) > 1 else None
        return owner if owner in serving else min(serving, key=lambda s: s.in_flight, default=None)

    async def wait(self, until: float) -> None:
        """Wait until the state of a server changes. Raises InfrastructureError at the time ``until``,
        ValueError if no server will serve."""
        if self._foreign.keys() == set(self.servers) and (self.held.label == START or self.held.adapter is not None):
            raise ValueError(next(iter(self._foreign.values())))
        left = until - time.monotonic()
        if left <= 0:
            raise InfrastructureError(self.no_server_message())
        if time.monotonic() - self._told >= WARN_EVERY_S:
            self._told = time.monotonic()
            logger.warning("%s; requests wait up to %.0f s", self.no_server_message(), left)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), left)

    def no_server_message(self) -> str:
        """Return the error message that no server serves, with each server's reason."""
        return "no vLLM server serves: " + "; ".join(f"{s.url}: {s.lost or 'ready'}" for s in self.servers)

    def lose(self, server: ServerClient, why: str) -> None:
        """Send no more requests to a server, and check the server until it is back."""
        if server.lost is None:
            logger.warning("vLLM server %s is lost (%s); its requests go to other servers, or wait", server, why)
        server.lost = why
        if server not in self._searches or self._searches[server].done():
            self._searches[server] = asyncio.ensure_future(self._search(server))

    async def recheck(self, until: float, why: str) -> None:
        """Check the serving servers after a router's answer was no use, and wait a moment. Raises InfrastructureError
        at the time ``until``."""
        if time.monotonic() >= until:
            raise InfrastructureError(f"the router gave no answer of use: {why}")
        for server in self.serving:
            try:
                await self.check(server)
                await self._require_held(server)
            except (InfrastructureError, ValueError) as error:
                self.lose(server, str(error))
        await asyncio.sleep(ROUTER_PAUSE_S)

    async def _keep_watch(self) -> None:
        """Find servers that have restarted while this rank sends them no requests. Other ranks wait for the rank that
        pushes to load the weights."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._settled.wait()
            watched = [s for s in self.serving if s.checked is not None]  # the start has yet to check the others
            for server in watched if self.sends else ():
                held = self.held
                try:
                    await self._require_held(server)
                except (InfrastructureError, ValueError) as error:
                    if held is self.held:  # a push has not begun since, behind whose work the question waited
                        self.lose(server, str(error))

    async def _require_held(self, server: ServerClient) -> None:
        """Raise OtherWeights if a server does not hold this run's weights, unless a push is in progress."""
        held = self.held
        label, expected = await server.held(), START if held.adapter is not None else held.label
        if label != expected and self._settled.is_set() and held is self.held:
            raise OtherWeights(f"it holds weights {label}; expected {expected}")

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
                self._foreign.pop(server, None)
                logger.warning("vLLM server %s is back, with version %d", server, self.held.version)
                self._wake()
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _recover(self, server: ServerClient) -> None:
        """Let a lost server load the right weights, unless it has them. Raises the reason if it cannot serve."""
        await self.check(server)
        label, held = await server.held(), self.held
        if label == (START if held.adapter is not None else held.label):
            if held.adapter is not None and held.label not in await adapters_of(server):
                self._require_sender(held, label)
                await load_adapter(server, held.label, held.adapter)
            if await server.is_paused():  # a push or a recovery broke off at its very end
                self._require_sender(held, label)
                await server.post("/resume", again=True)
            return
        if held.label == START or held.adapter is not None:
            pushes = "none; restart the server, or push (callbacks.training.weight_sync.WeightSync)"
            self._be_foreign(server, label, pushes if held.adapter is None else "adapters; restart the server")
        self._require_sender(held, label)
        if not self._labels.has(label):
            self._be_foreign(server, label, f"{held.label}; take another server for each run")
        if not held.paths:
            raise InfrastructureError(
                f"it holds weights {label}; the files of {held.label} are removed; it gets the next push"
            )
        await require_files(server, held.paths, verify=False)
        # Its requests in flight are older than the push that it missed.
        await load_files(server, held.paths, held.label, self._labels.incomplete, between_steps=True)

    def _be_foreign(self, server: ServerClient, label: str, pushed: str) -> NoReturn:
        self._foreign[server] = f"{server} holds the weights of another run ({label}), and this run has pushed {pushed}"
        raise ValueError(self._foreign[server])

    def _require_sender(self, held: HeldWeights, label: str) -> None:
        if not self.sends:
            raise InfrastructureError(f"it holds weights {label}; the first rank loads {held.label}")

    # ------------------------------------------------------------------ what they serve
    async def reachable(self) -> list[ServerClient]:
        """Return the servers that answer, with any weights. A push does not wait long for a lost one. Raises
        InfrastructureError if none answers."""
        checks = (self.check(s, None if s.lost is None else CHECK_LOST_S) for s in self.servers)
        answers = await asyncio.gather(*checks, return_exceptions=True)
        for server, answer in zip(self.servers, answers, strict=True):
            if isinstance(answer, (InfrastructureError, ValueError)):
                self.lose(server, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
        reachable = [s for s, answer in zip(self.servers, answers, strict=True) if answer is None]
        if not reachable:
            raise InfrastructureError(self.no_server_message())
        return reachable

    async def check(self, server: ServerClient, timeout_s: float | None = None) -> None:
        """Check that a server serves the expected model with the flags of ``make engine``, once after each of its
        starts. A server that has just started gets the label of its folder's weights."""
        try:
            facts = server.facts = (await server.call("describe", timeout_s=timeout_s or CHECK_S))[0]
            started = facts["instance"] != server.checked
        except (InfrastructureError, ValueError) as error:
            if "status 404" in str(error) or "has no attribute 'describe'" in str(error):
                raise ValueError(
                    f"{server} was not started with the flags that `make engine` prints ({error}); start it with them"
                ) from None
            raise
        if refusal := self._refused.get(facts["instance"]):
            raise ValueError(refusal)
        if started:
            try:
                self._require_flags(server)
                await self._require_shapes(server)
                if self._adapters:
                    await self._require_base(server)
                if self._backend == FILES and rank() == 0:  # the other ranks write no files
                    await self._require_shared_memory(server)
            except ValueError as error:
                self._refused[facts["instance"]] = str(error)
                raise
        if await server.held() == UNCHECKED:
            await server.post("/update_weight_version", {"new_version": START})
        server.checked = facts["instance"]

    def _require_flags(self, server: ServerClient) -> None:
        facts = server.facts
        if facts["max_length"] < self._max_length:
            raise ValueError(
                f"{server} takes {facts['max_length']} tokens, not {self._max_length}; start it with that max_length, "
                "or lower this engine's"
            )
        if self._adapters and not facts["lora_rank"]:
            raise ValueError(f'{server} takes no adapters; start it by `make engine` with ARGS="--lora-rank 16"')
        for name, expected in {**EXPECTED, "backend": self._backend}.items():
            if facts[name] != expected:
                raise ValueError(
                    f"{server} has {name} {facts[name]}; expected {expected}: start it with the flags that `make "
                    "engine` prints"
                )

    async def _require_shapes(self, server: ServerClient) -> None:
        answer = (await server.call("shapes"))[0]
        found = {name: tuple(shape) for name, shape in answer["weights"].items()}
        shapes = ((name, found.get(name), self._expected.get(name)) for name in sorted(self._expected.keys() | found))
        optional = self._tied & set(answer["tied"])
        wrong = [(name, there, here) for name, there, here in shapes if there != here and name not in optional]
        if wrong:
            name, there, here = wrong[0]
            raise ValueError(
                f"{server} serves {server.facts['model']}, another model than {self._model}: {len(wrong)} weights "
                f"differ, first {name}: {there or 'missing'} there, {here or 'missing'} here; start it on a model of "
                "the same configuration"
            )

    async def _require_base(self, server: ServerClient) -> None:
        ours = self._base = self._base or await asyncio.to_thread(digest_of_folder, self._model)
        if (theirs := (await server.call("digest_of_folder"))[0]) != ours:
            raise ValueError(
                f"{server} serves other weights ({server.facts['model']}, {theirs}) than the policy's base "
                f"({self._model}, {ours}); adapters: true needs the same ones"
            )

    async def _require_shared_memory(self, server: ServerClient) -> None:
        """Require that every worker of a server can read a file in this host's shared memory."""
        answers: list[str | None] = []
        expected = ""
        if SHARED_MEMORY.is_dir():
            secret = secrets.token_bytes(32)
            expected = hashlib.sha256(secret).hexdigest()
            token = new_file(SHARED_MEMORY)
            try:
                token.write_bytes(secret)
                answers = await server.call("digest_of_test_file", str(token))
            except OSError as error:  # no room
                raise InfrastructureError(f"{SHARED_MEMORY}: {error}") from None
            finally:
                token.unlink(missing_ok=True)
        if set(answers) != {expected}:
            raise ValueError(
                f"{server} cannot read this host's {SHARED_MEMORY} (another machine or container), so weights cannot "
                "reach it; take transport: nccl, or start it on this host"
            )

    def _wake(self) -> None:
        """Let all requests that wait for a server check again."""
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
