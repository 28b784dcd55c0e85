"""Client of shared engine servers (``make engine``): load balancing, failover, and weight updates of all servers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from common.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from common.sessions import LoopSession
from rollout.engines.base import Generation, SamplingParams, check_request
from rollout.engines.process import check_model_folder
from rollout.engines.server.client import OtherWeights, ServerClient, ServerWeightState
from rollout.engines.server.nccl import NCCLSender
from rollout.engines.server.pool import ServerPool
from rollout.engines.weights.files import SHARED_MEMORY, WeightFiles, in_type, names_and_shapes, new_file
from rollout.trajectory import InfrastructureError, PermanentFailure

if TYPE_CHECKING:
    from rollout.engines.weights.push import Submit, Tensors

logger = logging.getLogger(__name__)


class ServerEngine:
    """Engine that generates on several HTTP servers of one model. Implements `base.Engine`.

    A request goes to the server that sampled the beginning of its ids, or to the one with the fewest requests in
    flight. A server is *lost* if it cannot be reached, its engine has died, or it holds other weights than the last
    push. Its requests go to other servers. It is checked repeatedly, and loads the weights from the sender's files. The
    same seeds give the same tokens on every server, so a failover does not change trajectories.

    Several ranks may share the servers. The first rank sends the weights, see ``rollout.engines.weights.push``.
    """

    shared = True

    def __init__(
        self,
        urls: list[str],
        model: str,
        max_length: PositiveInt = 1024,
        transport: Literal["shared_memory", "nccl"] = "shared_memory",
        retry_s: NonNegativeFloat = 300.0,
        timeout_s: PositiveFloat = 1800.0,
        bucket_mb: PositiveInt = 256,
    ) -> None:
        """
        Args:
            urls: such as ``["http://127.0.0.1:8100"]``.
            model: Hugging Face folder or name; the servers must serve a model of its shapes.
            max_length: given plus new tokens of a request, at most; not above the servers' max_length.
            transport: of weights. "shared_memory": files that servers on this host read. "nccl": vLLM's transfer, from
                GPU to GPU, also between machines (servers with ``weight_transfer: nccl``).
            retry_s: seconds that a request waits while no server serves, before it fails by infrastructure.
            timeout_s: seconds for one request, and for loading weights.
            bucket_mb: MiB of weights per broadcast; a larger tensor goes alone. NCCL only.
        """
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls) or len(set(urls)) < len(urls):
            raise ValueError(f'urls: expected different addresses such as "http://host:8100"; found {urls}')
        if retry_s < 0 or timeout_s <= 0 or bucket_mb < 1 or max_length < 2:
            raise ValueError(
                "expected retry_s >= 0, timeout_s > 0, bucket_mb >= 1, max_length >= 2; found "
                f"{retry_s}, {timeout_s}, {bucket_mb}, {max_length}"
            )
        self.max_length = max_length
        self._model, self._retry_s = model, retry_s
        self._sessions = LoopSession("ServerEngine")
        self._servers = [ServerClient(url, self._sessions, timeout_s) for url in urls]
        self._shapes: tuple[dict[str, tuple[int, ...]], set[str]] | None = None
        self._files = WeightFiles([])  # of the last push: kept for servers that restart
        self._pool: ServerPool | None = None
        self.nccl = NCCLSender(bucket_mb << 20) if transport == "nccl" else None

    @property
    def pool(self) -> ServerPool:
        if self._pool is None:
            raise InfrastructureError("the engine has not been started; await engine.start() first")
        return self._pool

    @property
    def held(self) -> ServerWeightState:
        """Identifies the weights that all engine servers must hold."""
        return self.pool.held

    # ------------------------------------------------------------------ the engine's interface
    async def start(self) -> None:
        """Check every engine server, without retries, because the user is present at the start.

        Raises:
            FileNotFoundError: the model's folder is missing or empty.
            ValueError: a server serves another model, takes shorter requests, or cannot read this host's shared memory.
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
            if self.nccl is None and (blind := await _blind_servers(self._servers)):
                raise ValueError(
                    f"{', '.join(map(str, blind))} cannot read this host's {SHARED_MEMORY} (another machine or "
                    "container), so weights cannot reach it; take transport: nccl, or start it on this host"
                )
        except BaseException:
            await self._sessions.close()
            raise
        self._pool = pool

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample and return a continuation of ``token_ids`` on one of the servers, see `base.Engine.generate`.

        Raises:
            ValueError: the request is malformed or too long, or the servers hold the weights of another run and this
                run has pushed none.
            PermanentFailure: the model's logits are not finite.
            InfrastructureError: no server served for ``retry_s`` seconds; the message has each server's reason.
        """
        (ids, sampling), pool = check_request(token_ids, sampling, self.max_length), self.pool
        until: float | None = None
        while True:
            server = pool.choose(ids)
            if server is None:
                until = until or time.monotonic() + self._retry_s
                await pool.wait(until)
                continue
            held = pool.held
            try:
                generation = await server.generate(ids, sampling, held.tag)
                await pool.accept(generation, held)
            except PermanentFailure:
                raise
            except InfrastructureError as error:
                if not isinstance(error, OtherWeights) or not await pool.moved_on(held):
                    pool.lose(server, str(error))
                continue
            pool.remember_cached([*ids, *generation.token_ids], generation.policy_version, server)
            return generation

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        """Load weights from files on all engine servers, see `base.Engine.load_files`. The engine takes over the files
        and removes them.

        Call it between `begin_push` and `end_push`. Returns when every reachable server holds the weights; the others
        load them when they are back.

        Raises:
            ValueError: a server refused. Generations come only from weights of complete pushes.
            InfrastructureError: no server took them.
        """
        held = ServerWeightState.new(version, files.paths)
        body = {"tag": held.tag, "version": version, "paths": files.paths, "between_steps": between_steps}
        try:
            took = await _each(await self.pool.reachable(), body)
        except BaseException:
            files.remove()
            raise
        self._files = files
        await self.adopt(held, took)

    async def probe(self, token_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Generation]:
        """Send one request to each engine server that serves. Returns the generations by address. Raises as
        `generate`."""
        serving = self.pool.serving
        if not serving:
            raise InfrastructureError(self.pool.no_server_message())
        answers = await asyncio.gather(*(s.generate(token_ids, sampling, self.held.tag) for s in serving))
        return {server.url: answer for server, answer in zip(serving, answers, strict=True)}

    async def close(self) -> None:
        """Disconnect from the servers, which keep running. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        self._forget_files()
        if self.nccl is not None:
            self.nccl.close()
        await self._sessions.close()

    # ------------------------------------------------------------------ pushes, also of another rank
    async def begin_push(self) -> None:
        """Begin a weight push, during which the first rank sends weights.

        `generate` returns tokens of the new weights only after the push, and samples them again if the push fails."""
        self.pool.begin_push()
        self._forget_files()  # first, because two copies of the model may not fit

    def send(self, submit: Submit, tensors: Tensors, version: int, checksum: bool, between_steps: bool) -> None:
        """Send weights to all engine servers in their dtype, by NCCL or by files. See
        `weights.push.SharedEngine.send`."""
        dtypes = {server.dtype for server in self._servers}
        tensors = in_type(tensors, dtypes.pop() if len(dtypes) == 1 else None)
        if self.nccl is not None:
            servers = submit(self.pool.reachable()).result()
            held = self.nccl.send(servers, submit, tensors, version, checksum, between_steps)
            submit(self.adopt(held, took=servers)).result()
        else:
            files = WeightFiles.write(tensors, checksum)
            submit(self.load_files(files, version, between_steps)).result()

    async def adopt(self, held: ServerWeightState, took: Sequence[ServerClient] | None = None) -> None:
        """Send requests only to servers that hold the weights ``held``: the servers ``took`` (None: all)."""
        if took is not None:
            for server in self._servers:
                if server in took:
                    server.lost = None
                else:
                    self.pool.lose(server, server.lost or "it was lost during a push")
        self.pool.adopt(held)

    async def end_push(self) -> None:
        self.pool.end_push()

    def _forget_files(self) -> None:
        self._files.remove()
        self._files = WeightFiles([])


async def _each(servers: Sequence[ServerClient], body: dict[str, Any]) -> list[ServerClient]:
    """Let all engine servers load weights at once. Returns the servers that did; those that did not answer are marked
    lost.

    Raises ValueError with the first refusal, InfrastructureError if no server is left.
    """
    outcomes = await asyncio.gather(*(s.post("/weights/load", body) for s in servers), return_exceptions=True)
    left: list[ServerClient] = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, InfrastructureError):
            server.lost = str(outcome)
            logger.warning("engine server %s is lost during a push (%s)", server, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            left.append(server)
    if not left:
        reasons = "; ".join(f"{server}: {server.lost}" for server in servers)
        raise InfrastructureError(f"no engine server took the weights: {reasons}")
    return left


async def _blind_servers(servers: Sequence[ServerClient]) -> list[ServerClient]:
    """Return the servers that cannot read a file in this host's shared memory."""
    if not SHARED_MEMORY.is_dir():
        return list(servers)
    token = new_file(SHARED_MEMORY)
    try:
        token.write_bytes(secret := secrets.token_bytes(32))
        answers = await asyncio.gather(*(s.post("/weights/sees", {"path": str(token)}) for s in servers))
    finally:
        token.unlink(missing_ok=True)
    expected = hashlib.sha256(secret).hexdigest()
    return [server for server, answer in zip(servers, answers, strict=True) if answer["sha256"] != expected]
