"""Weight update of an engine of one's own through one buffer that both processes see: on the GPU by a CUDA IPC handle,
on CPU as a file in shared memory.

The buffer holds some tensors at a time, in the engine's type, and the engine has copied them before the next ones are
written: no second copy of the model exists. The engine's side is `ipc_receiver.py`. On a GPU not run yet.
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

BUCKET_BYTES = 256 << 20  # of the buffer; a larger tensor makes it larger
ALIGNMENT = 256

Tensors = Iterable[tuple[str, "torch.Tensor"]]
Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]


def memory_of(device: torch.device) -> str:
    """Equal for two processes whose tensors lie in the same memory, whatever CUDA_VISIBLE_DEVICES calls the device."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class IPCSender:
    """One push: `connect`, `send`, `finish`, and in any case `close`: so long the buffer lives."""

    def __init__(self, engine: EngineProcess, submit: Submit) -> None:
        self._engine, self._submit = engine, submit
        self._buffer: torch.Tensor | None = None

    def connect(self, device: torch.device) -> None:
        """Let the engine open a buffer on ``device``. Nothing is changed.

        Raises:
            ValueError: it lies in other memory than the engine's model, or the engine cannot open it.
            OSError, RuntimeError: there is no room for it.
        """
        import torch

        info = self._engine.info
        ours, theirs = memory_of(device), info.get("ipc_memory")
        if ours != theirs:
            raise ValueError(f"the trainer's weights lie in {ours}, the engine's in {theirs or 'memory of its own'}")
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
        """Called in the trainer's thread. From the first bucket to `finish` the engine samples nothing.

        Raises:
            ValueError: a name or a shape does not fit: nothing was changed if the first bucket shows it, else, as with
                any error in the middle, the engine samples nothing until a whole push has come.
            UpdateInterrupted: the engine was started anew meanwhile.
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
        """Now the engine samples from what was sent. Raises UpdateInterrupted as `send`."""
        self._ask("finish_weight_update", {}, version=version, **keep)

    def close(self) -> None:
        """Let go of the buffer. Memory that the engine still maps is kept by torch until it has let go, too."""
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
        """Fill the buffer, again and again; what is told of each filling, while it lies there. Names that have come
        leave ``missing``."""
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
            if name in tied:  # comes under another name
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
            if checksum:  # of what was given, not of what lies in the buffer
                bucket["checksums"].append(tensor_checksum(tensor.to(dtype)))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if bucket["names"]:
            self._synchronize()
            yield bucket

    def _misfit(self, found: str) -> ValueError:
        return ValueError(
            f"the weights do not fit the engine's model: {found}. Push every parameter under its Hugging Face name, "
            "from a model of the configuration the engine was started with."
        )

    def _synchronize(self) -> None:
        """The copies have been made: the other process knows nothing of this one's streams."""
        if self._whole.is_cuda:
            import torch

            torch.cuda.current_stream(self._whole.device).synchronize()

    def _ask(self, method: str, arguments: dict[str, Any], **options: Any) -> None:
        self._submit(self._engine.transfer(method, arguments, **options)).result()


@contextmanager
def _shared(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, Any]]:
    """A buffer of bytes, and what another process opens it by inside the block."""
    import torch

    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer, reduce_tensor(buffer)[1]
        return
    path = new_file(SHARED_MEMORY)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else the first write to a full /dev/shm would end the process
        yield torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8), str(path)
    finally:  # both have mapped it
        path.unlink()


def _empty() -> dict[str, Any]:
    return {"names": [], "dtype_names": [], "shapes": [], "offsets": [], "checksums": []}


def view(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """The part of a buffer of bytes that begins at ``start``, as a tensor."""
    shape = list(shape)
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
