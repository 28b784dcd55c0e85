"""Weight update from the trainer's GPU to vLLM servers by NCCL, through vLLM 0.32's weight transfer.

Not run yet, because it needs several GPUs. Written for vllm/distributed/weight_transfer (nccl_engine.py,
nccl_common.py) and vllm/v1/worker/gpu_worker.py. The sender is rank 0 of a process group with the workers of all
servers. vLLM's own trainer class (``NCCLTrainerWeightTransferEngine``) knows one server, and needs all names and shapes
before the first tensor is gathered. Here each ``/update_weights`` announces a bucket, which then arrives by broadcast.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from common.secret import is_local
from rollout.engines.vllm_servers.client import ServerClient
from rollout.engines.vllm_servers.transfer import updating

if TYPE_CHECKING:
    import torch

Tensors = Iterable[tuple[str, "torch.Tensor"]]
Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
Members = tuple[tuple[str, str], ...]  # address and instance of each server


class NCCLSender:
    """Sends weights to vLLM servers by NCCL, in buckets, and keeps copies of one bucket on the sender's GPU.

    If a server refuses an announced bucket, or dies before its broadcast, the push fails. The next push creates a new
    process group, as it does if the servers change.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._group: Any = None
        self._members: Members = ()

    def send(
        self,
        servers: list[ServerClient],
        submit: Submit,
        tensors: Tensors,
        label: str,
        incomplete: str,
        checksum: bool,
        between_steps: bool,
    ) -> None:
        """Send all weights to the servers. ``label``, ``incomplete`` and ``between_steps``: see `transfer.updating`.

        Called in the trainer's thread, which gathers and broadcasts; ``submit`` runs requests in the event loop.

        Raises:
            ValueError: ``checksum`` is set, the weights are not on a GPU, or a server refuses.
            InfrastructureError: a server does not answer.
        """
        if checksum:
            raise ValueError(
                "checksum: true works only with transport: files; with transport: nccl take probe: true with a "
                "probe_tolerance"
            )
        buckets = _device_buckets(tensors, self._bucket_bytes)
        first = next(buckets, None)
        if first is None:
            raise ValueError("there are no weights to send")
        submit(self._join(servers, first[0][1].device)).result()
        updates = _Updates([updating(server, label, incomplete, between_steps) for server in servers])
        try:
            submit(updates.begin()).result()
            for bucket in itertools.chain([first], buckets):
                update = {
                    "names": [name for name, _ in bucket],
                    "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                }
                self._deliver(submit(_all(servers, "/update_weights", {"update_info": update})), bucket)
        except BaseException as error:
            submit(updates.end(error)).result()
            raise
        submit(updates.end()).result()

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
        self._group, self._members = None, ()

    async def _join(self, servers: Sequence[ServerClient], device: torch.device) -> None:
        """Create the NCCL process group of this rank and all workers of all servers, unless it exists."""
        if device.type != "cuda":
            raise ValueError(f"transport: nccl needs weights on a GPU; found {device.type}: take files")
        members = tuple((server.url, server.facts["instance"]) for server in servers)
        if members == self._members:
            return
        if self._members:
            stale = {url for url, instance in self._members if (url, instance) in members}
            await _all([server for server in servers if server.url in stale], "/shutdown_weight_transfer_engine")
            self.close()
        workers = [await server.get("/get_world_size", "world_size") for server in servers]  # of all its replicas
        address, port = _own_address([server.url for server in servers]), _free_port()
        common = {"master_address": address, "master_port": port, "world_size": 1 + sum(workers), "packed": False}
        inits = [
            server.post("/init_weight_transfer_engine", {"init_info": {**common, "rank_offset": 1 + sum(workers[:i])}})
            for i, server in enumerate(servers)
        ]
        joined = asyncio.ensure_future(asyncio.gather(*inits))  # both sides meet at the rendezvous
        sender = asyncio.ensure_future(asyncio.to_thread(_join_as_sender, address, port, 1 + sum(workers), device))
        for done in (await asyncio.wait({joined, sender}, return_when=asyncio.FIRST_EXCEPTION))[0]:
            done.result()  # a server that refuses leaves the sender waiting
        self._group = sender.result()
        self._members = members

    def _deliver(self, announced: Future[Any], bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Broadcast a bucket to servers that have been told of it. A broadcast that a server does not join never ends,
        so it runs in a thread, which is left behind if a server answers with an error."""
        sent: Future[None] = Future()

        def broadcast() -> None:
            try:
                self._broadcast(bucket)
                sent.set_result(None)
            except BaseException as error:
                sent.set_exception(error)

        threading.Thread(target=broadcast, daemon=True, name="nccl-broadcast").start()
        try:
            for done in as_completed([announced, sent]):
                done.result()
        except BaseException:
            self._group, self._members = None, ()  # cannot be used again
            raise

    def _broadcast(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        import torch

        device = bucket[0][1].device
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            for _, tensor in bucket:
                self._group.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()


def _join_as_sender(address: str, port: int, world_size: int, device: torch.device) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    return stateless_init_process_group(address, port, 0, world_size, device)


class _Updates:
    """Weight updates of several servers at once (`transfer.updating`)."""

    def __init__(self, updates: Sequence[contextlib.AbstractAsyncContextManager[None]]) -> None:
        self._updates = updates
        self._open: list[contextlib.AbstractAsyncContextManager[None]] = []  # those that have begun

    async def begin(self) -> None:
        """Begin the updates. If one cannot begin, `end` breaks off the others."""
        outcomes = await asyncio.gather(*(update.__aenter__() for update in self._updates), return_exceptions=True)
        begun = zip(self._updates, outcomes, strict=True)
        self._open = [update for update, outcome in begun if not isinstance(outcome, BaseException)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def end(self, error: BaseException | None = None) -> None:
        """Finish the updates, or with ``error`` break them off."""
        kind = type(error) if error is not None else None
        ends = [update.__aexit__(kind, error, None) for update in self._open]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        for outcome in outcomes if error is None else ():
            if isinstance(outcome, BaseException):
                raise outcome


async def _all(servers: Sequence[ServerClient], path: str, body: dict[str, Any] | None = None) -> None:
    await asyncio.gather(*(server.post(path, body) for server in servers))


def _device_buckets(tensors: Tensors, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield buckets of (name, contiguous copy on the tensor's device). Copies, because a gathered tensor may be freed
    with the next one."""
    import torch

    bucket, held = [], 0
    for name, tensor in tensors:
        bucket.append((name, tensor.detach().clone(memory_format=torch.contiguous_format)))
        held += tensor.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def _own_address(urls: Sequence[str]) -> str:
    """Return this host's address on the route to the servers, without sending anything. It is a loopback address only
    if all servers are on this host."""
    found = []
    for parts in map(urlsplit, urls):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))
            found.append(probe.getsockname()[0])
    return next((address for address in found if not is_local(address)), found[0])


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
