"""Export the trained policy as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from callbacks.model_export import adapters
from callbacks.trainer import is_better, policy_source, settle_parameters, stage_dir
from common.digests import check_digests, write_digests
from common.files import (
    DiskFullError,
    is_no_room,
    no_room_message,
    obey_umask,
    recover_folder,
    remove,
    replace_folder,
)
from rollout.engines.weights.files import require_finite
from rollout.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


class TrainedPolicy(Protocol):
    """The attributes that an export needs of a training module (``PolicyModule`` has them). ``lora_settings`` and
    ``adapter_weights()`` are optional."""

    policy: torch.nn.Module

    def policy_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...


def export_policy(
    module: TrainedPolicy,
    folder: Path,
    *,
    is_global_zero: bool = True,
    tokenizer: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write the trained policy as a Hugging Face model to ``folder``, replacing the folder as a whole. The weights are
    ``module.policy_weights()``, gathered from all ranks; configuration, generation configuration and tokenizer are
    included. A collective: all ranks must call it.

    Raises:
        DiskFullError: the disk is full; the previous folder is intact.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in module.policy_weights():  # every rank iterates to the end: gathering is collective
        if is_global_zero:
            state[name] = tensor.detach().to("cpu", dtype=dtype, copy=True)
    settings, low_rank = getattr(module, "lora_settings", None), {}
    if settings is not None:
        low_rank = {name: tensor.cpu() for name, tensor in cast(Any, module).adapter_weights()}
    if is_global_zero:
        adapter = Adapter(low_rank, settings, policy_source(module)) if settings is not None else None
        write_folder(module.policy, state, folder, tokenizer or policy_source(module), max_shard_size, adapter)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA adapters of a trained policy, with their settings and base model (``adapters.write_adapter``)."""

    weights: dict[str, torch.Tensor]
    settings: dict[str, Any]
    base: str


def write_folder(
    policy: Any,
    state: dict[str, torch.Tensor],
    folder: Path,
    tokenizer: str,
    max_shard_size: str = "5GB",
    adapter: Adapter | None = None,
) -> None:
    """Write a Hugging Face model (weights, configurations of ``policy``, tokenizer, SHA-256 of the files) to
    ``folder``, replacing the folder as a whole. Adapters that were merged into the weights are written to its subfolder
    ``adapter``.

    Raises:
        DiskFullError: the disk is full; the previous folder is intact.
        ValueError: a weight is not finite; the previous folder is intact.
    """
    temporary = folder.with_name(f".{folder.name}.new")
    remove(temporary)
    try:
        temporary.mkdir(parents=True)
        _write(policy, state, temporary, tokenizer, max_shard_size)
        if adapter is not None:
            adapters.write_adapter(temporary / adapters.FOLDER, adapter.weights, adapter.settings, adapter.base)
        obey_umask(temporary)
        write_digests(temporary)
    except Exception as error:
        remove(temporary)
        if is_no_room(error):
            raise DiskFullError(no_room_message(folder, "An earlier export there is intact.")) from error
        raise
    recover_folder(folder)
    replace_folder(temporary, folder)


def _write(policy: Any, state: dict[str, torch.Tensor], folder: Path, tokenizer: str, max_shard_size: str) -> None:
    from huggingface_hub import save_torch_state_dict

    for name, tensor in state.items():
        require_finite(name, tensor)
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size)
    _write_settings(policy, next(iter(state.values())).dtype, folder, tokenizer)


def _write_settings(policy: Any, dtype: torch.dtype, folder: Path, tokenizer: str) -> None:
    """Write the model's configuration, generation configuration and tokenizer to ``folder``. The generation
    configuration is written directly, because ``save_pretrained`` refuses configurations that it loads with a warning,
    such as a temperature without ``do_sample``."""
    config = copy.deepcopy(policy.config)
    config.architectures = [type(policy).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if getattr(policy, "generation_config", None) is not None:
        policy.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    load_tokenizer(tokenizer).save_pretrained(folder)


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read all weights of an exported model folder, yielding (name, tensor), one tensor in memory at a time."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file; expected an exported model")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


@torch.no_grad()
def load_policy(policy: torch.nn.Module, folder: Path) -> None:
    """Copy the weights (or LoRA adapters) of an exported model folder into ``policy``, which ZeRO-3 may have
    partitioned. A collective under ZeRO-3.

    Raises:
        ValueError: a parameter is missing in the folder.
    """
    parameters = dict(policy.named_parameters())
    low_rank = {name: parameter for name, parameter in parameters.items() if adapters.is_adapter(name)}
    parameters = low_rank or parameters
    missing = set(parameters)
    for name, tensor in adapters.read_adapter(folder / adapters.FOLDER) if low_rank else read_weights(folder):
        if name not in parameters:
            continue  # a tied head, written under its own name too
        parameter = parameters[name]
        with _gathered(parameter):
            parameter.data.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} parameters of the policy, for example {sorted(missing)[0]}")


@contextlib.contextmanager
def _gathered(parameter: torch.nn.Parameter) -> Iterator[None]:
    if not hasattr(parameter, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


class Export(L.Callback):
    """Exports the trained policy to ``model/`` in the stage's output folder. The next stage, ``make ask`` and ``make
    export`` start from it.

    Args:
        choose: "last" exports at the end of fit. "best" exports after each validation that is strictly better than all
            before; at the end of fit the exported weights are copied back into the policy, so that the test that
            follows measures what was exported. A run whose validations never gave the monitored metric exports
            its last weights, with a warning.
        monitor, mode: metric for "best", and whether larger or smaller is better.
        tokenizer: folder to take the tokenizer from; default: where the policy was loaded from.
        dtype: "float32", "bfloat16" or "float16"; default: as trained.
    """

    def __init__(
        self,
        choose: Literal["best", "last"] = "last",
        monitor: str = "val/acc",
        mode: Literal["max", "min"] = "max",
        tokenizer: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    ) -> None:
        self.choose = choose
        self.monitor = monitor
        self.mode = mode
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.best_score: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "monitor": (self.monitor, self.mode)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("monitor") == (self.monitor, self.mode):
            self.best_score = state_dict["best_score"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        recover_folder(self.folder(trainer))
        policy = cast(Any, pl_module).policy
        with tempfile.TemporaryDirectory() as folder:  # a refusal of transformers ends the run here, not after training
            _write_settings(policy, policy.dtype, Path(folder), self.tokenizer or policy_source(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.choose != "best" or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and is_better(float(value), self.best_score, self.mode):
            self.best_score = float(value)
            self._export(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # After on_train_end: the last checkpoint must hold the last weights, not the best ones.
        if self.choose == "best" and self.best_score is not None:
            if trainer.is_global_zero:
                check_digests(self.folder(trainer))
            trainer.strategy.barrier("export")
            settle_parameters(trainer)
            load_policy(cast(TrainedPolicy, pl_module).policy, self.folder(trainer))
            return
        if self.choose == "best":
            log.warning("no validation logged %s: exporting the last weights instead of the best ones", self.monitor)
        self._export(trainer, pl_module)

    def folder(self, trainer: L.Trainer) -> Path:
        return stage_dir(trainer) / "model"

    def _export(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        settle_parameters(trainer)
        export_policy(
            cast(TrainedPolicy, module),
            self.folder(trainer),
            is_global_zero=trainer.is_global_zero,
            tokenizer=self.tokenizer,
            dtype=getattr(torch, self.dtype) if self.dtype else None,
        )
