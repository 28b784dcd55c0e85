"""The engine's side of `ipc.py`: a backend of vLLM 0.32's weight transfer (vllm/distributed/weight_transfer/base.py).

It differs from vLLM's own packed `ipc` (ipc_engine.py): it opens the buffer before it changes the model, takes tensors
larger than a bucket, compares checksums, and uses shared memory without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.engines.weights.files import require_finite, tensor_checksum
from rollout.engines.weights.ipc import view

NAME = "compact_agents_ipc"


@dataclass
class Init(WeightTransferInitInfo):
    handle: Any  # path of a file in shared memory, or the arguments of torch's ``rebuild_cuda_tensor``
    size: int  # bytes


@dataclass
class Update(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    checksums: list[str]  # empty: they are not compared


class BufferTransfer(WeightTransferEngine[Init, Update]):
    init_info_cls = Init
    update_info_cls = Update
    _buffer: torch.Tensor | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        """Open the trainer's shared buffer of one weight push, once, because torch counts how often an exported handle
        is opened."""
        self.shutdown()
        if isinstance(init_info.handle, str):
            self._buffer = torch.from_file(init_info.handle, shared=True, size=init_info.size, dtype=torch.uint8)
            return
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(init_info.handle)
        arguments[6] = self.device.index  # the device index may differ between the two processes
        self._buffer = rebuild_cuda_tensor(*arguments)

    def start_weight_update(self) -> None:
        if self._buffer is None:
            raise RuntimeError(
                "a weight update started without a buffer; expected init_weight_transfer_engine before it"
            )
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        if self._buffer is None:
            raise RuntimeError("weights arrived without a buffer; expected init_weight_transfer_engine before them")
        weights: list[tuple[str, torch.Tensor]] = []
        places = zip(update_info.names, update_info.dtype_names, update_info.shapes, update_info.offsets, strict=True)
        for name, dtype, shape, offset in places:
            # Copy, because vLLM keeps tensors until a layer is complete, and the next bucket overwrites the buffer.
            weights.append((name, view(self._buffer, offset, getattr(torch, dtype), shape).clone()))
        for (name, tensor), sent in zip(weights, update_info.checksums, strict=False):
            if (found := tensor_checksum(tensor)) != sent:
                raise ValueError(
                    f"the weights changed in transfer: {name} has the checksum {found}, the trainer sent {sent}. Push "
                    "again, and if this recurs, suspect the memory."
                )
        for name, tensor in weights:
            require_finite(name, tensor)
        model: Any = self.model
        model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self.shutdown()

    def shutdown(self) -> None:
        self._buffer = None


def register() -> str:
    """Register the transfer through a shared buffer with vLLM as a weight transfer backend, and return its name."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, BufferTransfer)
    return NAME
