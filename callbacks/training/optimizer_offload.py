"""Optimiser states in the host's memory while the engine generates (``rollouts.sleep_mode: true``)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


def offload_optimizer(trainer: L.Trainer) -> None:
    """Move the optimisers' states (AdamW: 8 bytes per parameter) to the host's memory, pinned under CUDA, and give the
    device's unused memory back. They are ordinary tensors there: checkpoints hold the same as without.

    ZeRO's masters stay on the device, and so do DDP's buckets of gradients.
    DeepSpeed's ``offload_states`` is not called: at stage 3 it takes its own FusedAdam only, at stage 2 it leaves views
    that hold the states' memory (0.19.8).
    """
    for optimizer in trainer.optimizers:
        _unlink(optimizer)
        _resize_gradients(optimizer, there=False)
        for state in optimizer.state.values():
            for name, value in _states(state):
                if value.device.type != "cpu":
                    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
                    state[name] = host.copy_(value)
    torch.cuda.empty_cache()  # nothing without CUDA


def reload_optimizer(trainer: L.Trainer) -> None:
    """Move the states back to where their parameters are, before an optimiser step."""
    for optimizer in trainer.optimizers:
        _resize_gradients(optimizer, there=True)
        for parameter, state in optimizer.state.items():
            for name, value in _states(state):
                state[name] = value.to(parameter.device)


def _states(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """What there is of every element; counters (``step``) stay where they are."""
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _resize_gradients(optimizer: Any, there: bool) -> None:
    """ZeRO-3 holds its shard of the gradients in one buffer with many views, which is zero between two steps
    (sharding/strategies.py): its memory comes and goes under them. Elsewhere gradients are None."""
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is None or buffer.device.type == "cpu":
        return
    storage, size = buffer.untyped_storage(), buffer.nbytes if there else 0
    if storage.size() != size:  # a supervised stage asks before every batch
        storage.resize_(size)
        if there:
            buffer.zero_()


def _unlink(optimizer: Any) -> None:
    """ZeRO-2 keeps views of the states beside each parameter; its next step makes them anew."""
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        for group in optimizer.bit16_groups:
            for parameter in group:
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.optim_fragment = None
        optimizer._hp_optimizer_states_linked = False
