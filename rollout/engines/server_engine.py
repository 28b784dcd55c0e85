"""Engine servers (``make engine``) in the place of an engine of one's own."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from rollout.engines.base import Generation, SamplingParams
from rollout.engines.process import check_model_folder
from rollout.engines.server_client import Held, OtherWeights, ServerClient
from rollout.engines.server_pool import ServerPool
from rollout.engines.weight_transport import Order, Transport, make_transport
from rollout.engines.weights import names_and_shapes
from rollout.services import LoopSession
from rollout.trajectory import InfrastructureError

if TYPE_CHECKING:
    import torch


class ServerEngine:
    """Generates on servers that all serve one model; implements `base.Engine`.

    A request goes to the server that has sampled the beginning of its ids, else to the one with the fewest requests
    under way. A server that cannot be reached, whose engine has died or that holds other weights than the last push
    brought is *lost*: its requests go to the others, and it is looked at again and again until it is back with the
    right weights, which it gets from the sender's files or from another server. The same seeds give the same tokens on
    every server, so nothing of this shows in the trajectories.

    Several ranks may share the servers: ``RolloutSystem.load_weights`` lets the first rank send and tells the others.
    """

    shared_by_ranks = True

    def __init__(
        self,
        urls: list[str],
        model: str,
        max_length: int = 1024,
        transport: Literal["auto", "shared_memory", "http", "nccl"] = "auto",
        retry_s: float = 300.0,
        timeout_s: float = 1800.0,
        bucket_mb: int = 256,
        restore: bool = True,
    ) -> None:
        """
        Args:
            urls: such as ``["http://127.0.0.1:8100"]``.
            model: Hugging Face folder or name; the servers must serve a model of its shapes.
            max_length: given plus new tokens of a request, at most; not more than the servers take.
            transport: of weights. "auto": files in shared memory where all servers see this host's, else HTTP. "nccl":
                vLLM's own transfer from GPU to GPU (servers with ``weight_transfer: nccl``).
            retry_s: seconds for which a request waits while no server serves, before it fails as infrastructure.
            timeout_s: seconds for one request, and for one bucket of weights.
            bucket_mb: MiB of weights that go together by HTTP; a larger tensor goes alone.
            restore: keep the last push's files (the model's size: in shared memory, or on the servers' disks), from
                which a server that was started anew gets its weights at once; without, at the next push.
        """
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls) or len(set(urls)) < len(urls):
            raise ValueError(f'urls: expected different addresses such as "http://host:8100"; found {urls}')
        if retry_s < 0 or timeout_s <= 0 or bucket_mb < 1 or max_length < 2:
            raise ValueError(
                "expected retry_s >= 0, timeout_s > 0, bucket_mb >= 1, max_length >= 2; found "
                f"{retry_s}, {timeout_s}, {bucket_mb}, {max_length}"
            )
        self.max_length = max_length
        self._model, self._transport_name, self._restore = model, transport, restore
        self._retry_s, self._bucket_bytes = retry_s, bucket_mb << 20
        self._sessions = LoopSession("ServerEngine")
        self._servers = [ServerClient(url, self._sessions, timeout_s) for url in urls]
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        self._transport: Transport | None = None
        self._pool: ServerPool | None = None

    @property
    def pool(self) -> ServerPool:
        if self._pool is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")
        return self._pool

    @property
    def held(self) -> Held:
        """The weights that generations come from."""
        return self.pool.held

    # ------------------------------------------------------------------ the engine's interface
    async def start(self) -> None:
        """Ask every server what it serves. No patience here: who starts a training is there to start a server.

        Raises:
            FileNotFoundError: the model's folder is missing or empty.
            ValueError: a server serves another model, or shorter requests.
            InfrastructureError: a server does not answer.
        """
        if self._pool is not None:
            return
        check_model_folder(self._model)
        self._shapes = self._shapes or await asyncio.to_thread(names_and_shapes, self._model)
        pool = ServerPool(self._servers, self._model, self.max_length, *self._shapes)
        try:
            for server in self._servers:
                server.lost = None
                await pool.check(server)
            make = make_transport(self._transport_name, self._servers, self._bucket_bytes, self._restore)
            self._transport = await make
        except BaseException:
            await self._sessions.close()
            raise
        self._pool = pool

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """See `base.Engine.generate`.

        Raises:
            ValueError: the request is malformed or too long, or nothing has been pushed to servers that hold what
                another run pushed.
            InfrastructureError: no server has served for ``retry_s`` seconds, with each one's reason.
        """
        ids, pool = [int(t) for t in token_ids], self.pool
        if len(ids) + sampling.max_new_tokens > self.max_length:
            raise ValueError(
                f"{len(ids)} given + {sampling.max_new_tokens} new tokens exceed max_length {self.max_length}; shorten "
                "the request or raise max_length"
            )
        until: float | None = None
        while True:
            await pool.admission()
            server = pool.choose(ids)
            if server is None:
                until = until or time.monotonic() + self._retry_s
                await pool.wait(until)
                continue
            held = pool.held
            try:
                generation = await server.generate(ids, sampling, held.tag)
                await pool.accept(generation, held)
            except InfrastructureError as error:
                if not isinstance(error, OtherWeights) or not await pool.moved_on(held):
                    pool.lose(server, str(error))
                continue
            pool.sampled([*ids, *generation.token_ids], generation.policy_version, server)
            return generation

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        checksum: bool = False,
        between_steps: bool = False,
    ) -> None:
        """See `base.Engine.load_weights`. Returns when every server that can be reached holds the weights; one that
        cannot be reached gets them when it is back. Requests that come meanwhile wait; ``between_steps`` they begin
        with the old weights, and a server changes its own between two steps. What new weights have sampled is given out
        when all servers have them, and sampled anew if the push fails.

        Raises:
            ValueError: a server refused; nothing is given out from weights other than complete pushes'.
            InfrastructureError: no server took them.
        """
        pool = self.pool
        pool.expect_push(between_steps)
        try:
            reachable = await pool.reachable()
            order = Order(uuid.uuid4().hex, version, checksum, between_steps)
            held, took = await self._transport.push(reachable, tensors, order)
            for server in self._servers:
                if server in took:
                    server.lost = None
                else:
                    pool.lose(server, server.lost or "it was lost while weights were pushed")
            pool.adopt(held)
        finally:
            pool.give_up()

    async def probe(self, token_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Generation]:
        """What each server that serves says to one request, by its address. Raises as `generate`."""
        serving = self.pool.serving
        if not serving:
            raise InfrastructureError(self.pool.nobody())
        answers = await asyncio.gather(*(s.generate(token_ids, sampling, self.held.tag) for s in serving))
        return {server.url: answer for server, answer in zip(serving, answers, strict=True)}

    async def close(self) -> None:
        """Let go of the servers, which go on running. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        await self._sessions.close()

    # ------------------------------------------------------------------ pushes of another rank (rollout.weight_push)
    async def expect_push(self, between_steps: bool) -> None:
        """Until `adopt` or `give_up` the first rank is sending; as in `load_weights`."""
        self.pool.expect_push(between_steps)

    async def adopt(self, held: Held) -> None:
        """From now on generations come from these weights."""
        self.pool.adopt(held)

    async def give_up(self) -> None:
        """The push that was expected has failed."""
        self.pool.give_up()
