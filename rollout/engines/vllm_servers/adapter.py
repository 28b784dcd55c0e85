"""LoRA adapters as weight updates of vLLM servers, through vLLM's LoRA API: megabytes instead of gigabytes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.engines.vllm_servers.client import ServerClient
from rollout.engines.weights.files import SHARED_MEMORY, own_prefix, remove_leftovers, require_finite

if TYPE_CHECKING:
    import torch

NAMES = "base_model.model."  # before every name in a file of peft's format


class AdapterFolder:
    """Folder with one LoRA adapter in peft's format, in shared memory.

    Attributes:
        path: of the folder.
        rank: of the adapter.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    @classmethod
    def write(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> AdapterFolder:
        """Write an adapter. Its product B A is added to the weights without a factor.

        Args:
            tensors: (Hugging Face name of the module + ".lora_A.weight" or ".lora_B.weight", tensor).

        Raises:
            ValueError: there are no tensors, their ranks differ, or a number is not finite.
            OSError: there is no room.
        """
        from safetensors.torch import save_file

        named: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            require_finite(name, tensor)
            named[NAMES + name] = tensor.detach().to("cpu", copy=True).contiguous()
        ranks = {tensor.shape[0] for name, tensor in named.items() if name.endswith(".lora_A.weight")}
        if len(ranks) != 1:
            raise ValueError(
                f"adapters: true needs LoRA adapters of one rank (model.lora); found ranks {sorted(ranks)}"
            )
        (rank,) = ranks
        modules = sorted({name.removeprefix(NAMES).rpartition(".lora_")[0].rpartition(".")[2] for name in named})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        remove_leftovers(place)
        folder = Path(tempfile.mkdtemp(prefix=own_prefix(), dir=place))
        try:
            save_file(named, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": modules}))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, rank)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


async def load_adapter(server: ServerClient, name: str, folder: str, unload: Iterable[str] = ()) -> None:
    """Load an adapter on a server that has not loaded it yet.

    Args:
        name: name of the adapter in requests.
        folder: folder of the adapter.
        unload: names of adapters to unload, which no request needs.

    Raises:
        ValueError: the server refused the adapter; the message has its reason.
        InfrastructureError: the server did not answer, or vLLM could not load the adapter.
    """
    loaded = await adapters_of(server)
    if name not in loaded:
        await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
    for other in loaded & set(unload):
        await server.post("/v1/unload_lora_adapter", {"lora_name": other})


async def adapters_of(server: ServerClient) -> set[str]:
    """Return the names of the adapters that a server has loaded."""
    models = await server.get("/v1/models", "data")
    return {model["id"] for model in models if model.get("parent") is not None}
