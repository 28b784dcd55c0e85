"""Attention of a packed batch over slot storage, registered with transformers as an attention implementation.

One forward pass holds a single packed sequence ``[1, N]``: first one token for each decoding slot (rows 0..n-1 of the
storage, in order), then the new tokens of each slot that is being prefilled. Everything but attention works on packed
tokens anyway; attention is the function below, which writes the new keys and values into the storage and lets every
token see its own row only. No padding, no cache copies, no mask of the model's own.

Shape letters: N packed tokens, S slots, Hq/Hk query/key heads, M storage length, L longest row, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

IMPLEMENTATION = "compact_agents_slots"


@dataclass(slots=True)
class Prefill:
    """New tokens of one row: packed positions [begin, end) continue a row that already holds ``start`` tokens."""

    row: int
    start: int
    begin: int
    end: int


@dataclass(slots=True)
class SlotBatch:
    """What attention has to know about one forward pass; shared by all layers."""

    kv: torch.Tensor  # [layers, 2, S, Hk, M, D]
    positions: torch.Tensor  # [n] where each decoding row's new token goes (= tokens it holds already)
    longest: int  # 1 + largest entry of positions (0 without decoding rows)
    prefills: list[Prefill]
    _rows: torch.Tensor = field(init=False)
    _decode_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _prefill_masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = torch.arange(len(self.positions), device=self.positions.device)

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Additive mask [n, 1, L]: 0 where the row may look, -inf beyond its end or before its window."""
        if window not in self._decode_masks:
            columns = torch.arange(self.longest, device=self.positions.device)
            hidden = columns > self.positions[:, None]
            if window is not None:
                hidden |= columns <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self.kv.dtype, device=hidden.device)
            self._decode_masks[window] = mask.masked_fill_(hidden, -math.inf).unsqueeze(1)
        return self._decode_masks[window]

    def prefill_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Boolean mask [T, L] (True = visible) of ``prefills[index]``; None: plainly causal from the row's start, or a
        single token that sees everything."""
        key = (index, window)
        if key not in self._prefill_masks:
            span = self.prefills[index]
            new, total = span.end - span.begin, span.start + span.end - span.begin
            mask = None
            if (new > 1 and span.start > 0) or (window is not None and total > window):
                rows = torch.arange(span.start, total, device=self.kv.device)[:, None]
                columns = torch.arange(total, device=self.kv.device)
                mask = columns <= rows
                if window is not None:
                    mask &= columns > rows - window
            self._prefill_masks[key] = mask
        return self._prefill_masks[key]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_batch: SlotBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, N, D], key and value [1, Hk, N, D] -> ([1, N, Hq, D], None).

    Raises:
        NotImplementedError: the model wants something this attention does not compute (soft-capping, sinks, biases),
            or does not hand keyword arguments down to its attention layers.
    """
    if slot_batch is None:
        raise NotImplementedError(f"{type(module).__name__} gets no keyword arguments; use VLLMEngine for this model")
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"{type(module).__name__} needs {unsupported}; use VLLMEngine for this model")
    keys, values = slot_batch.kv[module.layer_idx]  # each [S, Hk, M, D]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = query[0], key[0], value[0]  # [H, N, D]
    parts = []
    n = len(slot_batch.positions)
    if n:
        keys[slot_batch._rows, :, slot_batch.positions] = key[:, :n].transpose(0, 1)
        values[slot_batch._rows, :, slot_batch.positions] = value[:, :n].transpose(0, 1)
        parts.append(_decode(query[:, :n].transpose(0, 1), keys, values, scale, slot_batch, sliding_window))
    for index, span in enumerate(slot_batch.prefills):
        packed, total = slice(span.begin, span.end), span.start + span.end - span.begin
        keys[span.row, :, span.start : total] = key[:, packed]
        values[span.row, :, span.start : total] = value[:, packed]
        mask = slot_batch.prefill_mask(index, sliding_window)
        parts.append(_prefill(query[:, packed], keys[span.row, :, :total], values[span.row, :, :total], scale, mask))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, batch: SlotBatch, window: int | None
) -> torch.Tensor:
    """query [n, Hq, D] against rows 0..n-1 of keys and values [S, Hk, M, D] -> [n, Hq, D]."""
    n, heads, size = query.shape
    kv_heads, longest = keys.shape[1], batch.longest
    keys, values = keys[:n, :, :longest], values[:n, :, :longest]
    mask = batch.decode_mask(window)  # [n, 1, L]
    grouped = query.reshape(n, kv_heads, heads // kv_heads, size)  # the queries of one key head: no repeated keys
    if query.device.type == "cpu":  # plain products: faster than SDPA's CPU kernel at one query per row
        scores = torch.matmul(grouped * scale, keys.transpose(2, 3))
        scores += mask.unsqueeze(1)
        attended = torch.matmul(torch.softmax(scores, dim=-1), values)
    else:
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.unsqueeze(1), scale=scale)
    return attended.reshape(n, heads, size)


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """query [Hq, T, D] of one row against its keys and values [Hk, L, D] -> [T, Hq, D]. Mask: see `prefill_mask`."""
    heads, new, size = query.shape
    kv_heads, total, _ = keys.shape
    shape = (kv_heads, heads // kv_heads, total, size)
    attended = F.scaled_dot_product_attention(
        query.reshape(kv_heads, heads // kv_heads, new, size),
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=scale,
    )
    return attended.reshape(heads, new, size).transpose(0, 1)


def register() -> str:
    """Make the implementation known to transformers; returns the name to load a model with."""
    from transformers import AttentionInterface

    # No mask function is registered under this name, so transformers builds no mask (and none is needed).
    AttentionInterface.register(IMPLEMENTATION, slot_attention)
    return IMPLEMENTATION
