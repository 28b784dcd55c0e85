"""Reads the stage's folder, the data module and the policy's source from a Lightning trainer and module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def stage_dir(trainer: L.Trainer) -> Path:
    """Return the stage's output folder: ``trainer.default_root_dir``, which the experiment sets."""
    return Path(trainer.default_root_dir)


def data_module(trainer: L.Trainer) -> Any:
    """Return the trainer's data module, or None if it was given dataloaders instead. Lightning does not declare the
    attribute."""
    return getattr(trainer, "datamodule", None)


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the trainer's callbacks. Lightning does not declare the attribute."""
    return getattr(trainer, "callbacks", [])


def settle_parameters(trainer: L.Trainer) -> None:
    """Wait until ZeRO-3 has finished prefetching parameters, so that a rank can gather them. Does nothing without
    ZeRO-3.

    DeepSpeed prefetches in the order of modules that it recorded. A step that runs fewer modules (such as an evaluation
    step without a forward pass) leaves prefetched parameters in flight, and gathering those fails ("Cannot partition a
    param in flight"). A collective under ZeRO-3.
    """
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is not None:
        engine.empty_partition_cache()


def policy_source(module: object) -> str:
    """Return the folder or hub name that the policy and its tokenizer were loaded from.

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
    """Return whether ``value`` is strictly better than ``best`` (None: no value yet) in ``mode`` "max" or "min". NaN
    never is."""
    if value != value:
        return False
    return best is None or (value > best if mode == "max" else value < best)
