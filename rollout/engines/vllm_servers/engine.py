"""Engine over any number of ``vllm serve`` processes: load balancing, failover, and weight updates of all servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

from common.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from common.secret import SECRET_VARIABLE
from common.sessions import LoopSession
from rollout.engines.base import Generation, SamplingParams, check_request, check_truncation
from rollout.engines.process import check_model_folder
from rollout.engines.vllm_servers.adapter import AdapterFolder, load_adapter
from rollout.engines.vllm_servers.client import KEEP_ALIVE_S, Labels, NotReached, OtherWeights, ServerClient, ServerDown
from rollout.engines.vllm_servers.flags import FILES, NCCL
from rollout.engines.vllm_servers.nccl import NCCLSender
from rollout.engines.vllm_servers.pool import HeldWeights, ServerPool
from rollout.engines.vllm_servers.transfer import clean, load_files, require_files
from rollout.engines.weights.files import WeightFiles, in_type, names_and_shapes
from rollout.trajectory import InfrastructureError, PermanentFailure

if TYPE_CHECKING:
    from rollout.engines.weights.push import Submit, Tensors


DEATHS = 3  # servers that may be lost with one request in flight, before the request fails


class VLLMServers:
    """Engine that generates on several ``vllm serve`` processes of one model (``make engine``). Implements
    `base.Engine`.

    A request goes to the server that sampled the beginning of its ids, or to the one with the fewest requests in
    flight. A server is *lost* if it cannot be reached, its engine has died, or it holds other weights than the last
    push. Its requests go to other servers. It is checked repeatedly, and loads the weights from the sender's files. On
    CPU in float32 the same seeds give the same tokens on every server, so a failover does not change trajectories.

    Every answer names the weights that sampled each token. An answer from other weights than those of this run's
    complete pushes is dropped, and its request is sent again.

    Several ranks may share the servers. The first rank sends the weights, see ``rollout.engines.weights.push``.
    """

    shared = True

    def __init__(
        self,
        urls: list[str],
        model: str,
        max_length: PositiveInt = 1024,
        router: str | None = None,
        transport: Literal["files", "nccl"] = "files",
        adapters: bool = False,
        retry_s: NonNegativeFloat = 300.0,
        timeout_s: PositiveFloat = 1800.0,
        silence_s: PositiveFloat = 60.0,
        request_seeds: bool | None = None,
        bucket_mb: PositiveInt = 256,
    ) -> None:
        """
        Args:
            urls: of all servers, such as ``["http://127.0.0.1:8100"]``.
            model: Hugging Face folder or name; the servers must serve a model of its shapes.
            max_length: given plus new tokens of a request, at most; not above the servers' max_length.
            router: address of a router in front of the servers. Requests for tokens go there, weights to ``urls``.
            transport: of weights. "files": safetensors files that servers on this host read. "nccl": vLLM's transfer,
                from GPU to GPU, also between machines.
            adapters: push the policy's LoRA adapters (``model.lora``) by files instead of its weights. The servers must
                serve the policy's base, and requests in flight finish with the old adapter.
            retry_s: seconds that a request waits while no server serves, before it fails by infrastructure.
            timeout_s: seconds for one request, and for loading weights.
            silence_s: a server that leaves a request unanswered for so long is asked for a sign of life; without one it
                is lost.
            request_seeds: see ``VLLMEngine``.
            bucket_mb: MiB of weights per broadcast; a larger tensor goes alone. NCCL only.
        """
        addresses = [url.rstrip("/") for url in (urls if router is None else [*urls, router])]
        if any("@" in url for url in addresses):
            raise ValueError(f"urls: expected addresses without a user; the servers' secret is in {SECRET_VARIABLE}")
        right = all(url.startswith(("http://", "https://")) for url in addresses)
        if adapters and transport == "nccl":
            raise ValueError("adapters: true pushes files; found transport: nccl, expected transport: files")
        if not urls or not right or len(set(addresses)) < len(addresses):
            raise ValueError(f'urls: expected different addresses such as "http://host:8100"; found {addresses}')
        self.max_length = max_length
        self._model, self._retry_s = model, retry_s
        self._sessions = LoopSession(
            "VLLMServers", connector=lambda: aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        )
        self._labels = Labels()
        self._servers = [ServerClient(url, self._sessions, timeout_s, silence_s) for url in urls]
        # Only the servers behind a router can give signs of life.
        self._router = ServerClient(router, self._sessions, timeout_s, timeout_s) if router is not None else None
        for client in (*self._servers, self._router):
            if client is not None:
                client.request_seeds = request_seeds
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        self._files = WeightFiles([])  # of the last push: kept for servers that restart
        self._adapters: dict[str, AdapterFolder] = {}  # by label: those that requests in flight may name
        self._named: Counter[str | None] = Counter()  # requests in flight, by the adapter that they name
        self.adapters = adapters  # whether a push needs adapters instead of weights
        self._pool: ServerPool | None = None
        self.nccl = NCCLSender(bucket_mb << 20) if transport == "nccl" else None

    @property
    def pool(self) -> ServerPool:
        if self._pool is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")
        return self._pool

    @property
    def held(self) -> HeldWeights:
        """Identifies the weights that all servers must hold."""
        return self.pool.held

    # ------------------------------------------------------------------ the engine's interface
    async def start(self) -> None:
        """Check every server, without retries. One that does not answer is lost from the start if another one answers.

        Raises:
            FileNotFoundError: the model's folder is missing or empty.
            ValueError: a server serves another model, takes shorter requests, was started with other flags, or cannot
                read this host's shared memory.
            InfrastructureError: no server answers, or one requires another secret.
        """
        if self._pool is not None:
            return
        check_model_folder(self._model)
        self._shapes = self._shapes or await asyncio.to_thread(names_and_shapes, self._model)
        backend = FILES if self.nccl is None else NCCL
        pool = ServerPool(
            self._servers, self._model, self.max_length, *self._shapes, backend, self.adapters, self._labels
        )
        try:
            silent: dict[ServerClient, ServerDown] = {}
            for server in self._servers:
                server.lost = None
                try:
                    await pool.check(server)
                    if await server.is_paused():  # a sender has disappeared
                        await server.post("/resume")
                except ServerDown as error:
                    silent[server] = error
            answering = [server for server in self._servers if server not in silent]
            if not answering:
                raise next(iter(silent.values()))
        except BaseException:
            await pool.close()
            await self._sessions.close()
            raise
        if self._router is not None:
            self._router.facts = answering[0].facts
        self._pool = pool
        for server, error in silent.items():
            pool.lose(server, str(error))

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample and return a continuation of ``token_ids`` on one of the servers, see `base.Engine.generate`.

        Raises:
            ValueError: the request is malformed or too long, or the servers hold the weights of another run and this
                run has pushed none.
            PermanentFailure: the model's logits are not finite, or several servers were lost with this request in
                flight.
            InfrastructureError: no server served for ``retry_s`` seconds; the message has each server's reason.
        """
        pool = self.pool
        ids, sampling = check_request(token_ids, sampling, self.max_length, pool.vocab_size)
        check_truncation(sampling, all(server.facts["truncation"] for server in self._servers if server.facts))
        until: float | None = None
        deaths = 0
        while True:
            server = pool.choose(ids)
            if server is None:
                until = until or time.monotonic() + self._retry_s
                await pool.wait(until)
                continue
            held = pool.held
            if self._router is None:
                until = None
            try:
                with self._naming(held.name):
                    answer = await (self._router or server).generate(ids, sampling, held.name)
                await pool.accept(answer, held)
            except PermanentFailure:
                await _taint(self._servers if self._router is not None else [server])
                raise
            except InfrastructureError as error:
                deaths += not isinstance(error, (OtherWeights, NotReached))
                if self._router is None:
                    pool.lose(server, str(error))
                else:
                    until = until or time.monotonic() + self._retry_s
                    await pool.recheck(until, str(error))
                if deaths >= DEATHS and self._router is None:
                    raise PermanentFailure(
                        f"{deaths} servers were lost with this request in flight, the last one: {error}. It is not "
                        "sent again: change the request"
                    ) from None
                continue
            if self._router is None:
                pool.remember_cached([*ids, *answer.generation.token_ids], answer.labels, server)
            return answer.generation

    async def load_files(
        self, files: WeightFiles, version: int, between_steps: bool = False, checksum: bool = True
    ) -> None:
        """Load weights from files on all servers, see `base.Engine.load_files`. The engine takes over the files and
        removes them.

        Call it between `begin_push` and `end_push`. Returns when every reachable server holds the weights; the others
        load them when they are back.

        Raises:
            ValueError: a server refused. Generations come only from weights of complete pushes.
            InfrastructureError: no server took them.
        """
        held = HeldWeights(self._labels.new(version), tuple(files.paths))
        try:
            servers = await self.pool.reachable()
            servers = await self._each(servers, [require_files(s, files.paths, checksum) for s in servers])
            incomplete = self._labels.incomplete
            load = [load_files(s, files.paths, held.label, incomplete, between_steps) for s in servers]
            took = await self._each(servers, load)
        except BaseException:
            files.remove()
            raise
        self._files = files
        await self.adopt(held, took)

    async def _load_adapter(self, adapter: AdapterFolder, version: int) -> None:
        held = HeldWeights(self._labels.new(version), adapter=str(adapter.path))
        old = list(self._adapters)[:-1]  # `begin_push` has waited for their requests
        try:
            servers = await self.pool.reachable()
            for server in servers:
                if server.facts["lora_rank"] < adapter.rank:
                    raise ValueError(
                        f"{server} takes adapters of rank {server.facts['lora_rank']}, the policy's have "
                        f"{adapter.rank}; start it with a larger --lora-rank"
                    )
            took = await self._each(servers, [load_adapter(s, held.label, str(adapter.path), old) for s in servers])
            await self._each(took, [clean(s) for s in took])
        except BaseException:
            adapter.remove()
            raise
        for label in old:
            self._adapters.pop(label).remove()
        self._adapters[held.label] = adapter
        await self.adopt(held, took)

    async def probe(self, token_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Generation]:
        """Send one request to each server that serves. Returns the generations by address. A server that does not
        answer is lost. Raises InfrastructureError if none does."""
        serving, held = self.pool.serving, self.held
        if not serving:
            raise InfrastructureError(self.pool.no_server_message())
        found: dict[str, Generation] = {}

        async def ask(server: ServerClient) -> None:
            answer = await server.generate(token_ids, sampling, held.name)
            await self.pool.accept(answer, held)
            found[server.url] = answer.generation

        await self._each(serving, [ask(server) for server in serving], "answered")
        return found

    async def close(self) -> None:
        """Disconnect from the servers, which keep running. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        self._forget_files()
        for adapter in self._adapters.values():
            adapter.remove()
        self._adapters.clear()
        if self.nccl is not None:
            self.nccl.close()
        await self._sessions.close()

    # ------------------------------------------------------------------ pushes, also of another rank
    async def begin_push(self) -> None:
        """Begin a weight push, during which the first rank sends weights.

        `generate` returns tokens of the new weights only after the push, and samples them again if the push fails. With
        adapters, wait for this rank's requests that name an older one than the last, whose files vLLM may need."""
        while any(name not in (None, self.held.name) for name in +self._named):  # a server that hangs is still noticed
            await asyncio.sleep(0.01)
        await self.pool.begin_push()
        self._forget_files()  # first, because two copies of the model may not fit

    def send(self, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool) -> None:
        """Send weights to all servers in their dtype, by NCCL or by files, or adapters. See
        `weights.push.SharedEngine.send`."""
        if self.adapters:
            return submit(self._load_adapter(AdapterFolder.write(tensors), version)).result()
        dtypes = {server.facts["dtype"] for server in self._servers if server.facts}
        tensors = in_type(tensors, dtypes.pop() if len(dtypes) == 1 else None)
        if self.nccl is not None:
            servers = submit(self.pool.reachable()).result()
            label, incomplete = self._labels.new(version), self._labels.incomplete
            self.nccl.send(servers, submit, tensors, label, incomplete, checksum, between_steps)
            submit(self.adopt(HeldWeights(label), took=servers)).result()
        else:
            files = WeightFiles.write(tensors, checksum)
            submit(self.load_files(files, version, between_steps, checksum)).result()

    async def adopt(self, held: HeldWeights, took: Sequence[ServerClient] | None = None) -> None:
        """Send requests only to servers that hold the weights ``held``: the servers ``took``, or all if another rank
        has pushed (None)."""
        self.pool.sends = took is not None
        if took is not None:
            for server in self._servers:
                if server in took:
                    server.lost = None
                else:
                    self.pool.lose(server, server.lost or "it was lost during a push")
        self.pool.adopt(held)

    async def end_push(self) -> None:
        self.pool.end_push()

    @contextlib.contextmanager
    def _naming(self, adapter: str | None) -> Iterator[None]:
        """Context manager for a request that names an adapter."""
        self._named[adapter] += 1
        try:
            yield
        finally:
            self._named[adapter] -= 1

    async def _each(
        self, servers: Sequence[ServerClient], work: Sequence[Coroutine[Any, Any, None]], did: str = "took the weights"
    ) -> list[ServerClient]:
        """Run ``work[i]`` for ``servers[i]``, all at once. Returns the servers that did it; the others are lost.

        Raises the first refusal (ValueError, PermanentFailure), or InfrastructureError if no server is left.
        """
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        left: list[ServerClient] = []
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, InfrastructureError) and not isinstance(outcome, PermanentFailure):
                self.pool.lose(server, str(outcome))
            elif outcome is not None:
                raise outcome
            else:
                left.append(server)
        if not left:
            reasons = "; ".join(f"{server}: {server.lost}" for server in servers)
            raise InfrastructureError(f"no vLLM server {did}: {reasons}")
        return left

    def _forget_files(self) -> None:
        self._files.remove()
        self._files = WeightFiles([])


async def _taint(servers: Sequence[ServerClient]) -> None:
    """Tell servers that their caches may contain numbers that are not finite."""
    await asyncio.gather(*(server.call("taint") for server in servers), return_exceptions=True)
