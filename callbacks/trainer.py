"""Accessors of a Lightning trainer and its module: the stage's folder, the data module, the policy's source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def stage_dir(trainer: L.Trainer) -> Path:
    """The stage's output folder: ``trainer.default_root_dir`` (experiments/ sets it)."""
    return Path(trainer.default_root_dir)


def data_module(trainer: L.Trainer) -> Any:
    """The data module of the run; None where loaders were given. Lightning sets the attribute without declaring it."""
    return getattr(trainer, "datamodule", None)


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Lightning sets this attribute without declaring it, too."""
    return getattr(trainer, "callbacks", [])


def settle_parameters(trainer: L.Trainer) -> None:
    """Wait for parameters that ZeRO-3 is still fetching ahead, before anyone gathers them. Nothing to do elsewhere.

    DeepSpeed prefetches along the order of modules that it has recorded. A step that runs fewer of them (an evaluation
    step that only hands trajectories on, fewer micro-batches than before) leaves the fetched ahead in flight, and
    gathering such a parameter fails ("Cannot partition a param in flight"). A collective under ZeRO-3.
    """
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:
        engine.empty_partition_cache()


def policy_source(module: object) -> str:
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
