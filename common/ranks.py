"""Gathers Python objects over the ranks of ``torch.distributed``. With one process, each function is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_GLOO: dict[str, Any] = {}  # the gloo group beside the default group ``world``, made at the first gather


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_objects(value: Any) -> list[Any]:
    """Return the picklable value of every rank, in rank order, on every rank. A collective.

    Raises:
        RuntimeError: a rank has ended, or has not come within the group's timeout; rank 0 names the missing ranks.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return [value]
    group = _host_group()
    dist.monitored_barrier(group, wait_all_ranks=True)  # a gather that times out would not name the missing ranks
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_lists(items: Sequence[Any]) -> list[Any]:
    """Return the concatenation of every rank's sequence, in rank order, on every rank. A collective."""
    return [item for part in gather_objects(list(items)) for item in part]


def _host_group() -> Any:
    """A gloo group of all ranks: NCCL would send pickles through the GPUs' memory."""
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        return None
    if _GLOO.get("world") is not dist.group.WORLD:
        _GLOO.update(world=dist.group.WORLD, group=dist.new_group(backend="gloo"))
    return _GLOO["group"]
