"""Weight update of a rank's own engine through a buffer that both processes share.

On a GPU the buffer is shared by a CUDA IPC handle, on CPU it is a file in shared memory. It contains some tensors at a
time, in the engine's type, and the engine copies them before the next ones are written, so that no second copy of the
model exists. `ipc_receiver.py` is the engine's side. Not run on a GPU yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollout.engines.weights.files import SHARED_MEMORY, new_file, tensor_checksum

if TYPE_CHECKING:
    import torch

    from rollout.engines.process import EngineProcess
    from rollout.engines.weights.files import WeightFiles

BUCKET_BYTES = 256 << 20  # size of the buffer; a larger tensor enlarges it
ALIGNMENT = 256

Tensors = Iterable[tuple[str, "torch.Tensor"]]
Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]


def memory_of(device: torch.device) -> str:
    """Return an id (text) of a device's memory, equal in all processes, whatever CUDA_VISIBLE_DEVICES is."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class IPCSender:
    """Pushes weights once through shared memory: call `connect`, `send`, `finish`, and always `close`, which frees the
    buffer."""

    def __init__(self, engine: EngineProcess, submit: Submit) -> None:
        self._engine, self._submit = engine, submit
        self._buffer: torch.Tensor | None = None

    def connect(self, device: torch.device) -> None:
        """Let the engine open a shared buffer on ``device``, without changing the engine's weights.

        Raises:
            ValueError: the engine's model is in other memory, or the engine cannot open the buffer.
            OSError, RuntimeError: the memory for the buffer is full.
        """
        import torch

        info = self._engine.info
        ours, theirs = memory_of(device), info.get("ipc_memory")
        if ours != theirs:
            raise ValueError(f"the trainer's weights are in {ours}, the engine's in {theirs or 'other memory'}")
        self._dtype = getattr(torch, info["dtype"])
        sizes = [math.prod(shape) * self._dtype.itemsize + ALIGNMENT for shape in info["weights"].values()]
        with _shared(max(*sizes, min(BUCKET_BYTES, sum(sizes))), device) as (buffer, handle):
            init = {"handle": handle, "size": buffer.numel()}
            try:
                self._ask("init_weight_transfer_engine", {"init_info": init})
            except ValueError as error:
                why = str(error).strip().splitlines()[-1]
                raise ValueError(f"the engine cannot open the trainer's memory: {why}") from error
            self._buffer = buffer

    def send(self, tensors: Tensors, checksum: bool, between_steps: bool) -> None:
        """Send all weights through the shared buffer, from the trainer's thread. The engine samples nothing from the
        first bucket to `finish`.

        Raises:
            ValueError: a name or a shape does not fit. In the first bucket this changes nothing. Later the engine, as
                after any other error, samples nothing until all weights are pushed again.
            UpdateInterrupted: the engine was restarted meanwhile.
        """
        started = False
        missing = self._engine.info["weights"].keys() - set(self._engine.info["tied"])
        for bucket in self._buckets(tensors, missing, checksum):
            if not started:
                self._ask("start_weight_update", {}, between_steps=between_steps)
                started = True
            self._ask("update_weights", {"update_info": bucket})
        if missing:
            raise self._misfit(f"{len(missing)} missing ({', '.join(sorted(missing)[:3])})")

    def finish(self, version: int, **keep: WeightFiles) -> None:
        """Finish the push, so that the engine samples from the new weights. Raises UpdateInterrupted as `send`."""
        self._ask("finish_weight_update", {}, version=version, **keep)

    def close(self) -> None:
        """Free the shared buffer of the weight push. On a GPU, its memory is free only when the engine has closed it,
        too."""
        on_gpu = self._buffer is not None and self._buffer.is_cuda
        self._buffer = None
        if on_gpu:
            import torch

            torch.cuda.ipc_collect()

    @property
    def _whole(self) -> torch.Tensor:
        if self._buffer is None:
            raise RuntimeError("connect comes before send")
        return self._buffer

    def _buckets(self, tensors: Tensors, missing: set[str], checksum: bool) -> Iterator[dict[str, Any]]:
        """Fill the shared buffer with weights repeatedly, and yield a description of its content each time. Removes
        sent names from ``missing``."""
        shapes, tied = self._engine.info["weights"], set(self._engine.info["tied"])
        names: set[str] = set()
        bucket, end = _empty(), 0
        for name, tensor in tensors:
            if name not in shapes or tuple(tensor.shape) != tuple(shapes[name]) or name in names:
                found = (
                    "given twice" if name in names else f"{tuple(tensor.shape)}, expected {shapes.get(name, 'none')}"
                )
                raise self._misfit(f"{name}: {found}")
            names.add(name)
            if name in tied:  # sent under another name
                continue
            missing.discard(name)
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            size = tensor.numel() * dtype.itemsize
            if end + size > self._whole.numel():
                self._synchronize()
                yield bucket
                bucket, end = _empty(), 0
            place = view(self._whole, end, dtype, tensor.shape)
            place.copy_(tensor.detach())
            bucket["names"].append(name)
            bucket["dtype_names"].append(str(dtype).removeprefix("torch."))
            bucket["shapes"].append(list(tensor.shape))
            bucket["offsets"].append(end)
            if checksum:  # of the given tensor, not of the buffer
                bucket["checksums"].append(tensor_checksum(tensor.to(dtype)))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if bucket["names"]:
            self._synchronize()
            yield bucket

    def _misfit(self, found: str) -> ValueError:
        return ValueError(
            f"the weights do not fit the engine's model: {found}. Push every parameter under its Hugging Face name, "
            "from a model of the engine's configuration."
        )

    def _synchronize(self) -> None:
        """Wait until the weights are copied into the buffer, because the other process cannot wait for this one's
        streams."""
        if self._whole.is_cuda:
            import torch

            torch.cuda.current_stream(self._whole.device).synchronize()

    def _ask(self, method: str, arguments: dict[str, Any], **options: Any) -> None:
        self._submit(self._engine.transfer(method, arguments, **options)).result()


@contextmanager
def _shared(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, Any]]:
    """Context manager that yields a shared buffer of ``size`` bytes, and a handle for another process to open it inside
    the block."""
    import torch

    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer, reduce_tensor(buffer)[1]
        return
    path = new_file(SHARED_MEMORY)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # otherwise a write to a full /dev/shm would kill the process
        yield torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8), str(path)
    finally:  # both processes have mapped it
        path.unlink()


def _empty() -> dict[str, Any]:
    return {"names": [], "dtype_names": [], "shapes": [], "offsets": [], "checksums": []}


def view(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a part of a byte buffer, from ``start``, as a tensor of the given dtype and shape."""
    shape = list(shape)
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
