"""Small collectives. Without torch.distributed each returns its argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks import gather_lists, gather_objects, rank, world_size

__all__ = ["gather_objects", "gather_values", "max_over_ranks", "rank", "stop_together", "sum_over_ranks", "world_size"]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum element-wise over ranks; the argument does not change. Every rank must call."""
    if world_size() == 1:
        return values
    values = values.detach().clone()
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(value: int, device: torch.device | str) -> int:
    """Return the largest of the ranks' integers. Every rank must call."""
    if world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor[0])


def gather_values(values: Tensor) -> Tensor:
    """Gather [n] of this rank to [N] of all ranks, in rank order; n may differ between ranks. Every rank must call."""
    if world_size() == 1:
        return values
    return values.new_tensor(gather_lists(values.tolist()))


@contextmanager
def stop_together() -> Iterator[None]:
    """Raise an error of any rank on all ranks at the end of the block, so that no rank waits in the next collective.

    The block must not contain collectives. Every rank must enter it.

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
