"""The workers' side of a ``vllm serve`` process: ``--worker-extension-cls
rollout.engines.vllm_servers.worker.ServedWorker``.

vLLM imports this module in every worker before it builds the model. The import registers a weight transfer backend for
files that trainer and server both see, which vLLM 0.32 lacks (vllm-project/vllm#48644, #52152). The methods of
`ServedWorker` are called over HTTP (``/collective_rpc``).
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.engines.vllm_backend import WorkerExtension, configure_amx, repack_tied_head
from rollout.engines.vllm_servers.flags import FILES
from rollout.engines.weights.files import PREFIX, WeightFiles, digest_of_folder, names_and_shapes

SEEN_BYTES = 4096  # largest test file of a trainer


@dataclass
class Init(WeightTransferInitInfo):
    """The backend for files needs nothing at its start."""


@dataclass
class Update(WeightTransferUpdateInfo):
    paths: list[str]  # safetensors files with all weights, from one trainer


class FileTransfer(WeightTransferEngine[Init, Update]):
    """Weight transfer backend of vLLM that loads safetensors files.

    One `receive_weights` loads all weights, so the model is complete before and after every HTTP request."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: Update) -> None:
        """Replace all weights of the model by those in the files. Raises ValueError, and changes nothing, if a file
        cannot be read, or a name or a shape does not fit."""
        model: Any = self.model
        files, (weights, tied) = WeightFiles(update_info.paths), names_and_shapes(self.model_config.model)
        files.validate(weights, optional=tied)
        initialize_layerwise_reload(model)
        model.load_weights(files.tensors(skip=tied))
        finalize_layerwise_reload(model, self.model_config)
        repack_tied_head(model, bool(tied))

    def finish_weight_update(self) -> None:
        """Close what a load that broke off has left open: the next load would count its tensors, too."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class ServedWorker(WorkerExtension):
    """Methods that `engine.VLLMServers` calls in each worker of a server. Their results travel as JSON."""

    vllm_config: Any  # of the worker
    _served_id: str
    _tainted = False

    def describe(self) -> dict[str, Any]:
        """Return facts of the server, and let it report log-probs before top-k and top-p from now on.

        ``instance`` is new after each start. ``seeds``: seeds of requests cost no speed. ``truncation``: log-probs are
        those before top-k and top-p. The other facts are options of vLLM."""
        if not hasattr(self, "_served_id"):
            self._served_id = uuid.uuid4().hex
        config = self.vllm_config
        model, transfer, lora = config.model_config, config.weight_transfer_config, config.lora_config
        device = config.device_config.device_type
        return {
            "instance": self._served_id,
            "model": model.model,
            "max_length": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": model.logprobs_mode,
            "max_logprobs": model.max_logprobs,
            "generation_config": model.generation_config,
            "backend": transfer and transfer.backend,
            "lora_rank": lora.max_lora_rank if lora else 0,
            "truncation": self.report_untruncated_logprobs(),
            "seeds": device == "cpu" or bool(config.use_v2_model_runner),
        }

    def shapes(self) -> dict[str, Any]:
        """Return names and shapes of the model's weights, and the names of tied weights."""
        weights, tied = names_and_shapes(self.vllm_config.model_config.model)
        return {"weights": {name: list(shape) for name, shape in weights.items()}, "tied": sorted(tied)}

    def digest_of_test_file(self, path: str) -> str | None:
        """Return the SHA-256 of a trainer's test file, or None if this host does not see the file."""
        if not _is_ours(path) or Path(path).stat().st_size > SEEN_BYTES:
            return None
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def digest_of_folder(self) -> str | None:
        """Return a digest of the weights in the model's folder, see ``weights.files.digest_of_folder``."""
        return digest_of_folder(self.vllm_config.model_config.model)

    def refusal_of_files(self, paths: list[str], verify: bool) -> str | None:
        """Return why weight files cannot be loaded, or None. The model is unchanged."""
        for path in paths:
            if not _is_ours(path):
                return f"{path[:200]} is not a weight file on this host; expected a trainer's file"
        weights, tied = names_and_shapes(self.vllm_config.model_config.model)
        files = WeightFiles(paths)
        try:
            files.validate(weights, optional=tied)
            files.verify(verify)
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def taint(self) -> None:
        """Note that the key/value cache may contain numbers that are not finite. The next weight update clears it."""
        self._tainted = True

    def is_tainted(self) -> dict[str, bool]:
        return {"tainted": self._tainted}

    def clear_tainted_cache(self) -> None:
        """Clear a tainted key/value cache. No request may need its entries."""
        if self._tainted:
            self.clear_cache()
            self._tainted = False

    def end_broken_update(self) -> None:
        """End a weight transfer whose sender has disappeared, or which failed: then vLLM takes it for ended, with half
        of its tensors."""
        self.abandon_weight_update()


def _is_ours(path: str) -> bool:
    try:
        return Path(path).name.startswith(PREFIX) and Path(path).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


configure_amx()
# It warns at every push of layers without weights in the files: tied ones, and rotary embeddings.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
if FILES not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(FILES, FileTransfer)
