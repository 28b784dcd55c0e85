"""Gather Python objects from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed


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
