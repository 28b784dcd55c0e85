"""Small collectives. On one process (or before torch.distributed starts) each is the identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks import gather_lists, gather_objects, rank, world_size

__all__ = ["gather_objects", "gather_values", "max_over_ranks", "rank", "stop_together", "sum_over_ranks", "world_size"]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Element-wise sum; the argument is left as it is. Every rank must call."""
    if world_size() == 1:
        return values
    values = values.detach().clone()
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(value: int, device: torch.device | str) -> int:
    """Largest of the ranks' integers. Every rank must call."""
    if world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor[0])


def gather_values(values: Tensor) -> Tensor:
    """[n] of this rank -> [N] of all ranks, in rank order; n may differ between ranks. Every rank must call."""
    if world_size() == 1:
        return values
    return values.new_tensor(gather_lists(values.tolist()))


@contextmanager
def stop_together() -> Iterator[None]:
    """What fails in the block on one rank (no collectives in it) is raised on all of them at its end, so that none
    waits in the next collective for one that has stopped. Every rank must come here.

    Raises:
        RuntimeError: what the ranks' errors say, the same on every rank; the error itself on one process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if world_size() == 1:
            raise
        error = caught
    said = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]:
        raise RuntimeError("; ".join(failed)) from error
