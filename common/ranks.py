"""Collectives over the ranks of ``torch.distributed``. With one process, each function is the identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_GLOO: dict[str, Any] = {}  # the gloo group beside the default group ``world``, made at the first gather
_WAIT: dict[str, Any] = {}  # "timeout": how long a gather waits for a rank; default: torch's 30 minutes


def wait_for(timeout: timedelta | None) -> None:
    """Let gathers wait as long for a rank as the strategy's other collectives. Torch would take its default for a
    barrier, whatever the process group's timeout."""
    _WAIT.clear()
    if timeout is not None:
        _WAIT["timeout"] = timeout


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_objects(value: Any) -> list[Any]:
    """Return the picklable values of all ranks as a list, in rank order, on every rank (a collective).

    Raises:
        RuntimeError: a rank has ended, or has not come within the group's timeout; rank 0 names the missing ranks.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return [value]
    group = _host_group()
    # A gather that times out would not name the missing ranks.
    dist.monitored_barrier(group, wait_all_ranks=True, **_WAIT)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_lists(items: Sequence[Any]) -> list[Any]:
    """Return the concatenated sequences of all ranks as one list, in rank order, on every rank (a collective)."""
    return [item for part in gather_objects(list(items)) for item in part]


def gather_values(values: Tensor) -> Tensor:
    """Return the values of all ranks as one tensor, from [n] on each rank to [N], in rank order (a collective). n may
    differ between ranks."""
    if world_size() == 1:
        return values
    return values.new_tensor(gather_lists(values.tolist()))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise sum of a tensor over ranks (a collective). The argument does not change."""
    import torch.distributed as dist

    if world_size() == 1:
        return values
    values = values.detach().clone()
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(value: int, device: torch.device | str) -> int:
    """Return the largest of the ranks' integers (a collective)."""
    import torch
    import torch.distributed as dist

    if world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor[0])


@contextmanager
def stop_together() -> Iterator[None]:
    """Context manager that raises an error of any rank on all ranks at the end of the block, so that no rank waits in
    the next collective.

    The block must not contain collectives. Every rank must enter it.

    Raises:
        RuntimeError: the messages of all ranks, the same on every rank; the error itself on one process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if world_size() == 1:
            raise
        error = caught
    messages = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]:
        raise RuntimeError("; ".join(failed)) from error


def _host_group() -> Any:
    """Return a gloo process group of all ranks, or None if the default group is gloo. NCCL would send pickles through
    the GPUs' memory."""
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        return None
    if _GLOO.get("world") is not dist.group.WORLD:
        _GLOO.update(world=dist.group.WORLD, group=dist.new_group(backend="gloo", **_WAIT))
    return _GLOO["group"]
