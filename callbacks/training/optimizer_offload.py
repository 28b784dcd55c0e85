"""Moves optimiser states to host memory while the engine generates (``rollouts.sleep_mode: true``)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


def offload_optimizer(trainer: L.Trainer) -> None:
    """Move the optimiser states (AdamW: 8 bytes per parameter) to host memory, and release the device's unused memory.
    Host memory is pinned under CUDA. Checkpoints are the same with and without.

    ZeRO's master weights and DDP's gradient buckets stay on the device. DeepSpeed's ``offload_states`` is not used: at
    stage 3 it accepts only its own FusedAdam, at stage 2 it leaves views that hold the states' memory (0.19.8).
    """
    for optimizer in trainer.optimizers:
        _unlink(optimizer)
        _resize_gradients(optimizer, there=False)
        for state in optimizer.state.values():
            for name, value in _states(state):
                if value.device.type != "cpu":
                    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
                    state[name] = host.copy_(value)
    torch.cuda.empty_cache()  # does nothing without CUDA


def reload_optimizer(trainer: L.Trainer) -> None:
    """Move the optimiser states from host memory back to the device of their parameters, before an optimiser step."""
    for optimizer in trainer.optimizers:
        _resize_gradients(optimizer, there=True)
        for parameter, state in optimizer.state.items():
            for name, value in _states(state):
                state[name] = value.to(parameter.device)


def _states(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the optimiser-state tensors that have one value per element, as (name, tensor), without counters
    (``step``)."""
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _resize_gradients(optimizer: Any, there: bool) -> None:
    """Free (``there=False``) or allocate the gradient buffer of ZeRO-3, which is zero between two optimiser steps
    (sharding/strategies.py). Its many views stay valid. Without ZeRO-3, gradients are None."""
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is None or buffer.device.type == "cpu":
        return
    storage, size = buffer.untyped_storage(), buffer.nbytes if there else 0
    if storage.size() != size:  # a supervised stage asks before every batch
        storage.resize_(size)
        if there:
            buffer.zero_()


def _unlink(optimizer: Any) -> None:
    """Remove the views of optimiser states that ZeRO-2 keeps beside each parameter. Its next optimiser step makes new
    views."""
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        for group in optimizer.bit16_groups:
            for parameter in group:
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.optim_fragment = None
        optimizer._hp_optimizer_states_linked = False
