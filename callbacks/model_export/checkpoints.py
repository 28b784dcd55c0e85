"""Convert any checkpoint of a run to a Hugging Face folder, from its files alone."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from callbacks.model_export import adapters
from callbacks.model_export.exporter import Adapter, read_weights, write_folder
from common.digests import check_digests
from common.errors import one_line
from common.files import UNREADABLE

SHARDS = "checkpoint"  # the folder in a DeepSpeed checkpoint that holds the ranks' files
POLICY = "policy."  # what the policy's names begin with in the module that was trained
WRAPPER = "_forward_module."  # what some strategies put before that


def export_checkpoint(
    checkpoint: Path, folder: Path, source: str, *, dtype: torch.dtype | None = None, max_shard_size: str = "5GB"
) -> None:
    """Write the policy in a checkpoint to ``folder`` as a Hugging Face model. Configuration and tokenizer come from
    ``source``, the model that training started from.

    LoRA checkpoints hold adapters only; they are merged into the weights of ``source``.

    Args:
        checkpoint: any checkpoint that ``checkpoint_weights`` reads.
        folder: replaced as a whole, once the new one is complete.
        source: Hugging Face folder (or owner/name) that the policy was started from.
        dtype: None keeps the checkpoint's (DeepSpeed: float32).

    Raises:
        ValueError: a missing checkpoint or shard, another model than ``source``, or changed files (``DigestError``).
        DiskFullError: the disk is full.
    """
    check_digests(checkpoint)
    found, adapter = checkpoint_weights(checkpoint), None
    settings = checkpoint_lora(checkpoint)
    if settings is not None:
        adapter = Adapter(found, settings, source)
        found = adapters.merge_into(source, found, settings)
    policy = skeleton(source)
    wanted = {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}
    missing, extra = sorted(wanted.keys() - found), sorted(found.keys() - policy.state_dict().keys())
    wrong = sorted(name for name in wanted if name in found and tuple(found[name].shape) != wanted[name])
    if missing or extra or wrong:
        first = (wrong or missing or extra)[0]
        there, here = tuple(found[first].shape) if first in found else "nothing", wanted.get(first, "nothing")
        raise ValueError(
            f"{checkpoint} is not of the model at {source}: {len(missing)} parameters missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape, first '{first}' ({there} in the checkpoint, {here} in the model); name "
            "the experiment that it belongs to"
        )
    state = {name: found[name].to(dtype) if dtype else found[name] for name in wanted}
    write_folder(policy, state, folder, source, max_shard_size, adapter)


def skeleton(source: str) -> Any:
    """Build the model at ``source`` without weights (on the meta device): its configuration, and its parameters' names
    and shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    policy.generation_config = read_generation_config(source) or policy.generation_config
    return policy


def read_generation_config(source: str) -> Any:
    """Read the ``GenerationConfig`` of the model at ``source``. Returns None if the model has none.

    Raises:
        ValueError: transformers cannot read the file.
    """
    from transformers import GenerationConfig

    file = Path(source) / "generation_config.json"
    try:
        return GenerationConfig.from_pretrained(source)
    except Exception as error:  # the class depends on the content of the file
        if isinstance(error, OSError) and not file.is_file():
            return None
        raise ValueError(f"{file}: transformers refuses it ({one_line(error)}); mend the file or remove it") from None


def checkpoint_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read the policy's weights from a checkpoint, as {Hugging Face name: tensor}, without frozen models, critics and
    optimisers.

    Reads a Lightning ``.ckpt`` file, a DeepSpeed folder (ZeRO-2 or 3; joins the ranks' float32 parts) or a Hugging Face
    folder. DeepSpeed's files are pickles that can run code: read only your own.

    Raises:
        ValueError: another kind of file, a missing shard, or a checkpoint without a policy.
    """
    if (checkpoint / "config.json").is_file():
        return dict(read_weights(checkpoint))
    if (checkpoint / SHARDS).is_dir():
        state = _sharded_state(checkpoint)
    elif checkpoint.is_file():
        state = _lightning_state(checkpoint)
    else:
        raise ValueError(
            f"{checkpoint} is not a checkpoint; expected a .ckpt file, a DeepSpeed folder (with a folder '{SHARDS}' in "
            "it) or a Hugging Face folder (with config.json)"
        )
    names = {name: name.removeprefix(WRAPPER) for name in state}
    weights = {short.removeprefix(POLICY): state[name] for name, short in names.items() if short.startswith(POLICY)}
    if not weights:
        raise ValueError(f"{checkpoint} holds no policy: none of its {len(state)} tensors is named {POLICY}<...>")
    return weights


def checkpoint_lora(checkpoint: Path) -> dict[str, Any] | None:
    """Return the LoRA settings saved in a checkpoint that contains only adapters, or None for any other checkpoint."""
    if (checkpoint / "config.json").is_file():
        return None
    if checkpoint.is_file():
        return _content(checkpoint).get("lora")
    model = min((checkpoint / SHARDS).glob("*_model_states.pt"))  # every rank's holds the same
    return torch.load(model, map_location="cpu", weights_only=False, mmap=True).get("lora")


def _lightning_state(path: Path) -> dict[str, torch.Tensor]:
    return _content(path)["state_dict"]


def _content(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (ValueError, *UNREADABLE) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"{path} is not a checkpoint, or is incomplete: {reason[0] if reason else error!r}") from None
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} is not a Lightning checkpoint: it has no state_dict")
    return content


def _sharded_state(folder: Path) -> dict[str, torch.Tensor]:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at deepspeed's first import
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    _require_models(folder / SHARDS)
    try:
        with _silence():
            state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=SHARDS, exclude_frozen_parameters=True)
            return dict(state or {})
    except (ValueError, *UNREADABLE) as error:
        raise ValueError(
            f"the DeepSpeed checkpoint {folder} is not complete: {error}. Copy the shards of all "
            "nodes into one folder, or take an earlier checkpoint"
        ) from None


def _require_models(shards: Path) -> None:
    """Raise ValueError if a DeepSpeed checkpoint lacks a rank's ``*_model_states.pt`` file. DeepSpeed itself notices
    only missing weights."""
    weights, models = (len(list(shards.glob(f"*_{kind}_states.pt"))) for kind in ("optim", "model"))
    if not models or (any(shards.glob("zero_pp_rank_*_model_states.pt")) and models != weights):
        raise ValueError(
            f"the DeepSpeed checkpoint {shards.parent} is not complete: {weights} files *_optim_states.pt and {models} "
            "*_model_states.pt, expected as many of each"
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide the output that DeepSpeed's checkpoint conversion prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
