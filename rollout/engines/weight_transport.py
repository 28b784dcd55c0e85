"""How weights go from the trainer to engine servers: files in shared memory, or buckets by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollout.engines.server_client import Held, ServerClient
from rollout.engines.weights import SHARED_MEMORY, Bucket, WeightFiles, buckets, new_file
from rollout.trajectory import InfrastructureError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Tensors = Iterable[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class Order:
    """One push: its own tag, the weights' version, whether to send checksums along, and whether what servers are
    sampling goes on with the new weights (else it ends first)."""

    tag: str
    version: int
    checksum: bool = False
    between_steps: bool = False

    def body(self, **further: Any) -> dict[str, Any]:
        """What a server is told."""
        return {"tag": self.tag, "version": self.version, "between_steps": self.between_steps, **further}


class Transport(Protocol):
    async def push(
        self, servers: Sequence[ServerClient], tensors: Tensors, order: Order
    ) -> tuple[Held, list[ServerClient]]:
        """Bring all ``tensors`` to the servers; what the servers hold then, and which of them took it. A server that
        is lost on the way is left behind. ``tensors`` is consumed in threads, never in two at once.

        Raises:
            ValueError: a server refused.
            InfrastructureError: none took it.
        """
        ...

    def close(self) -> None:
        """Remove what was kept."""
        ...


async def make_transport(name: str, servers: Sequence[ServerClient], bucket_bytes: int, keep: bool) -> Transport:
    """See ``ServerEngine``. Raises ValueError where shared memory is asked for and a server does not see it."""
    if name == "nccl":
        from rollout.engines.nccl_transport import NCCLTransport

        return NCCLTransport(bucket_bytes)
    if name in ("auto", "shared_memory"):
        blind = await blind_servers(servers)
        if not blind:
            return SharedMemory(keep)
        if name == "shared_memory":
            raise ValueError(
                f"{', '.join(map(str, blind))} cannot read this host's {SHARED_MEMORY} (another machine, or another "
                "container); take transport: http"
            )
    return HTTPBuckets(bucket_bytes, keep)


async def blind_servers(servers: Sequence[ServerClient]) -> list[ServerClient]:
    """Those that do not see a file written to this host's shared memory."""
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


async def each(servers: Sequence[ServerClient], call: Callable[[ServerClient], Awaitable[Any]]) -> list[ServerClient]:
    """Call all at once; those that did not answer are marked lost and left out.

    Raises ValueError with the first refusal, InfrastructureError if nobody is left.
    """
    outcomes = await asyncio.gather(*map(call, servers), return_exceptions=True)
    left = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, InfrastructureError):
            server.lost = str(outcome)
            logger.warning("engine server %s is lost while weights are pushed (%s)", server, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            left.append(server)
    if not left:
        told = "; ".join(f"{server}: {server.lost}" for server in servers)
        raise InfrastructureError(f"no engine server took the weights: {told}")
    return left


class SharedMemory:
    """Files that are written once and read by every server on this host. Kept until the next push if ``keep``."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._files = WeightFiles([])

    async def push(
        self, servers: Sequence[ServerClient], tensors: Tensors, order: Order
    ) -> tuple[Held, list[ServerClient]]:
        self.close()  # first: two models' worth of files may not fit
        files = await WeightFiles.write_in_thread(tensors, order.checksum)
        try:
            body = order.body(paths=files.paths)
            took = await each(servers, lambda server: server.post("/weights/load", body))
        except BaseException:
            files.remove()
            raise
        if self._keep:
            self._files = files
            return Held(order.tag, order.version, paths=tuple(files.paths)), took
        files.remove()
        return Held(order.tag, order.version), took

    def close(self) -> None:
        self._files.remove()
        self._files = WeightFiles([])


class HTTPBuckets:
    """One bucket at a time, to all servers at once. The sender holds a bucket and its bytes, a server a piece of it;
    what has arrived waits on the server's disk until all is there."""

    def __init__(self, bucket_bytes: int, keep: bool) -> None:
        self._bucket_bytes, self._keep = bucket_bytes, keep

    async def push(
        self, servers: Sequence[ServerClient], tensors: Tensors, order: Order
    ) -> tuple[Held, list[ServerClient]]:
        left = await each(servers, lambda server: server.post("/weights/begin", {"tag": order.tag}))
        source = self._serialised(tensors, order.checksum)
        count = 0
        with contextlib.closing(source):
            while (body := await asyncio.to_thread(next, source, None)) is not None:
                path = f"/weights/bucket/{order.tag}/{count}"
                left = await each(left, lambda server, path=path, body=body: server.put(path, body))
                count += 1
        whole = order.body(buckets=count, keep=self._keep)
        left = await each(left, lambda server: server.post("/weights/commit", whole))
        return Held(order.tag, order.version, buckets=count if self._keep else 0), left

    def _serialised(self, tensors: Tensors, checksum: bool) -> Iterator[bytes]:
        for bucket in buckets(tensors, self._bucket_bytes, checksum):
            yield self._body(bucket)

    def _body(self, bucket: Bucket) -> bytes:
        from safetensors.torch import save

        return save(bucket.tensors, bucket.metadata)

    def close(self) -> None:
        """Servers keep their own files until the next push, or their end."""
