"""What several callbacks need: the stage's folder, objects of all ranks, where the policy came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch


def stage_dir(trainer: L.Trainer) -> Path:
    """The stage's output folder: ``trainer.default_root_dir`` (experiments/ sets it)."""
    return Path(trainer.default_root_dir)


def gather_objects(local: Any) -> list[Any]:
    """``local`` of every rank, ordered by rank, on every rank. A collective: all ranks must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [local]
    everything: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, local)
    return everything


def gather_lists(local: Sequence[Any]) -> list[Any]:
    """The concatenation of every rank's sequence, ordered by rank, on every rank."""
    return [item for part in gather_objects(list(local)) for item in part]


def settle_parameters(trainer: L.Trainer) -> None:
    """Wait for parameters that ZeRO-3 is still fetching ahead, before anyone gathers them. Nothing to do elsewhere.

    DeepSpeed prefetches along the order of modules that it has recorded. A step that runs fewer of them (an evaluation
    step that only hands trajectories on, fewer micro-batches than before) leaves the fetched ahead in flight, and
    gathering such a parameter fails ("Cannot partition a param in flight"). A collective under ZeRO-3.
    """
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:
        engine.empty_partition_cache()


def policy_source(module: L.LightningModule) -> str:
    """Folder or hub name the policy was loaded from, which also holds its tokenizer.

    Raises:
        ValueError: the policy was not loaded from anywhere.
    """
    source = getattr(getattr(module, "policy", None), "name_or_path", "") or ""
    if not source:
        raise ValueError(
            f"{type(module).__name__}.policy has no name_or_path, so its tokenizer cannot be found; "
            "load the policy with from_pretrained, or give the callback its `tokenizer` option"
        )
    return source


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Whether ``value`` is strictly better than ``best`` (None: nothing yet). NaN never is."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)
