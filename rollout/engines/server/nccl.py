"""Weight update from the trainer's GPU to vLLM servers by NCCL, through vLLM 0.32's weight transfer.

Not run yet, because it needs several GPUs. Written for vllm/distributed/weight_transfer (nccl_engine.py,
nccl_common.py) and vllm/v1/worker/gpu_worker.py. The sender is rank 0 of a process group with the workers of all
servers. An update is `start_weight_update`, any number of `update_weights`, and `finish_weight_update`. Each
`update_weights` announces tensors, which then arrive by broadcast.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollout.engines.server.client import ServerClient, ServerWeightState

if TYPE_CHECKING:
    import torch

Tensors = Iterable[tuple[str, "torch.Tensor"]]
Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
Members = tuple[tuple[str, str], ...]  # address and instance of each server


class NCCLSender:
    """Sends weights to vLLM servers by NCCL, in buckets, and keeps copies of one bucket on the sender's GPU.

    Servers must run VLLMEngine with ``weight_transfer: nccl``. If a server dies between announcement and broadcast, the
    sender waits in NCCL, as in any collective, until the process group's watchdog ends the run. If the servers change,
    the sender creates a new group.
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
        version: int,
        checksum: bool,
        between_steps: bool,
    ) -> ServerWeightState:
        """Send all weights to the servers, and return their new state (tag and version of the push).

        Called in the trainer's thread, which gathers and broadcasts; ``submit`` runs requests in the event loop.

        Raises:
            ValueError: ``checksum`` is set, the weights are not on a GPU, or a server cannot receive or refuses.
            InfrastructureError: a server does not answer.
        """
        if checksum:
            raise ValueError(
                "checksum: true works only with transport: shared_memory; with transport: nccl take probe: true with a "
                "probe_tolerance"
            )
        held, started = ServerWeightState.new(version), False
        for bucket in _device_buckets(tensors, self._bucket_bytes):
            if not started:
                submit(self._join(servers, bucket[0][1].device)).result()
                submit(_all(servers, "start_weight_update", {"tag": held.tag, "between_steps": between_steps})).result()
                started = True
            update = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            announced = submit(_all(servers, "update_weights", {"arguments": {"update_info": update}}))
            self._broadcast(bucket)
            announced.result()
        if not started:
            raise ValueError("there are no weights to send")
        submit(_all(servers, "finish_weight_update", {"tag": held.tag, "version": version})).result()
        return held

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
        self._group, self._members = None, ()

    async def _join(self, servers: Sequence[ServerClient], device: torch.device) -> None:
        """Create the NCCL process group of this rank and all workers of all servers, unless it exists."""
        if device.type != "cuda":
            raise ValueError(f"transport: nccl needs weights on a GPU; found {device.type}: take shared_memory")
        said = await asyncio.gather(*(server.health() for server in servers))
        members = tuple((server.url, health["instance"]) for server, health in zip(servers, said, strict=True))
        if members == self._members:
            return
        unable = [s.url for s, health in zip(servers, said, strict=True) if health.get("weight_transfer") != "nccl"]
        if unable:
            servers_unable = ", ".join(unable)
            raise ValueError(
                f"start {servers_unable} with VLLMEngine and weight_transfer: nccl (or take transport: shared_memory)"
            )
        if self._members:
            stale = {url for url, instance in self._members if (url, instance) in members}
            await _all([server for server in servers if server.url in stale], "shutdown_weight_transfer_engine", {})
            self.close()
        workers = [health["workers"] for health in said]
        address, port = _own_address(servers[0].url), _free_port()
        common = {"master_address": address, "master_port": port, "world_size": 1 + sum(workers), "packed": False}
        inits = [
            server.post(
                "/transfer/init_weight_transfer_engine",
                {"arguments": {"init_info": {**common, "rank_offset": 1 + sum(workers[:i])}}},
            )
            for i, server in enumerate(servers)
        ]
        joined = asyncio.ensure_future(asyncio.gather(*inits))  # both sides meet at the rendezvous
        self._group = await asyncio.to_thread(_join_as_sender, address, port, 1 + sum(workers), device)
        await joined
        self._members = members

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


async def _all(servers: Sequence[ServerClient], method: str, body: dict[str, Any]) -> None:
    await asyncio.gather(*(server.post(f"/transfer/{method}", body) for server in servers))


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


def _own_address(url: str) -> str:
    """Return this host's address on the route to a server, without sending anything."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]
