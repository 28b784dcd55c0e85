"""An engine that receives weights as vLLM does by NCCL, call by call straight into its model, but out of files: what
stands between the sender and the model is the real thing."""

from __future__ import annotations

import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from rollout.engines.nccl_transport import NCCLTransport
from rollout.engines.process import EngineProcess
from rollout.engines.transformers_backend import TransformersBackend


class FileTransferBackend(TransformersBackend):
    def __init__(self, folder: str, **options) -> None:
        super().__init__(**options)
        self._folder = Path(folder)

    def transfer(self, method, arguments) -> None:
        if method == "update_weights":
            info = arguments["update_info"]
            path, targets = self._folder / f"{info['names'][0]}.safetensors", self._model.state_dict()
            deadline = time.monotonic() + 60
            while not path.exists():  # as a broadcast waits for its sender
                assert time.monotonic() < deadline
                time.sleep(0.001)
            tensors = load_file(path)
            path.unlink()
            assert [list(tensors[name].shape) for name in info["names"]] == info["shapes"]
            for name in info["names"]:
                targets[name].data.copy_(tensors[name])
        elif method == "finish_weight_update":
            self._interrupt()
            self._slots.clear()


class FileTransferEngine(EngineProcess):
    def __init__(self, model: str, slots: int, max_length: int, folder: str) -> None:
        options = {"model": model, "slots": slots, "max_length": max_length, "dtype": "float32", "device": "cpu"}
        backend = f"{__name__}.FileTransferBackend"
        super().__init__(backend, options | {"folder": folder}, max_length=max_length)


class FileTransport(NCCLTransport):
    def __init__(self, bucket_bytes: int, folder: Path) -> None:
        super().__init__(bucket_bytes)
        self._folder = folder

    async def _join(self, servers, device) -> None:
        pass

    def _broadcast(self, bucket) -> None:
        path = self._folder / f"{bucket[0][0]}.safetensors"
        save_file(dict(bucket), part := path.with_suffix(".part"))
        part.rename(path)
