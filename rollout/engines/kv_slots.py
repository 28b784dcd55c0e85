"""Key/value storage of the transformers engine: rows that hold sequences, found again by their prefix."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an admitted sequence went: ``row``, whose first ``cached`` tokens need no computation."""

    row: int
    cached: int


class KVSlots:
    """``slots`` rows of keys and values, of which rows ``0 .. active-1`` belong to running sequences.

    Running rows stay in front (rows are moved, not gathered), so that a decoding step reads plain views. A row whose
    sequence has ended keeps its contents until the row is needed: the next turn of that trajectory continues it, and
    other sequences copy the prefix they share with it. Idle rows are reused least recently used first. Without
    ``reuse`` every sequence is computed whole: what reuse spares can be measured so.
    """

    # A request waits one step for a row that is being filled with its prefix, if that spares at least this many tokens.
    WORTH_WAITING = 16

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        reuse: bool = True,
    ) -> None:
        # zeros, not empty: masked positions are multiplied by weight 0, and 0 * NaN is NaN
        self.kv = torch.zeros(layers, 2, slots, kv_heads, max_length, head_dim, dtype=dtype, device=device)
        self.slots, self.max_length, self._reuse = slots, max_length, reuse
        self.active = 0
        self._ids = np.zeros((slots, max_length), dtype=np.int64)
        self._computed = np.zeros(slots, dtype=np.int64)  # tokens whose keys and values lie in the row
        self._planned = np.zeros(slots, dtype=np.int64)  # the same after the coming forward pass
        self._used = np.zeros(slots, dtype=np.int64)
        self._clock = itertools.count(1)

    @property
    def lengths(self) -> np.ndarray:
        """[active] tokens computed in each running row."""
        return self._computed[: self.active]

    def admit(self, token_ids: np.ndarray) -> Placement | None:
        """Give ``token_ids`` [n] a running row holding the longest known prefix (never all of it: the last token is
        always computed, its logits are needed). None: no row is free, or its prefix is being computed right now."""
        if self.active == self.slots:
            return None
        source, cached = self._longest_prefix(token_ids)
        if self._planned_prefix(token_ids) >= cached + self.WORTH_WAITING:
            return None
        row, victim = self.active, self._victim()
        if source >= row and (cached == self._computed[source] or source == victim):
            self._swap(source, row)  # continue an idle row that holds only the prefix, or whose rest nobody needs
        else:
            if victim != row:
                self._copy(row, victim, int(self._computed[row]))
                source = victim if source == row else source
            if source != row:
                self._copy(source, row, cached)
        self._ids[row, : len(token_ids)] = token_ids
        self._computed[row], self._planned[row] = cached, len(token_ids)
        self.active += 1
        return Placement(row, cached)

    def append(self, token_ids: np.ndarray) -> None:
        """Note the tokens [active] just sampled: the next forward pass computes them."""
        rows = np.arange(self.active)
        self._ids[rows, self._planned[: self.active]] = token_ids
        self._planned[: self.active] += 1

    def forward_done(self) -> None:
        """All planned tokens have been computed."""
        self._computed[: self.active] = self._planned[: self.active]

    def release(self, row: int) -> int:
        """End the running sequence in ``row``; its contents stay as an idle prefix. Returns the row whose sequence
        now lives in ``row`` (the last running one, moved down; ``row`` itself if it was the last)."""
        last = self.active - 1
        self._planned[row] = self._computed[row]
        self._used[row] = next(self._clock)
        self._swap(row, last)
        self.active = last
        return last

    def clear(self) -> None:
        """Forget every prefix (the weights changed). Only while nothing runs."""
        if self.active:
            raise RuntimeError(f"{self.active} sequences are running; prefixes can only be dropped while idle")
        self._computed[:] = 0
        self._planned[:] = 0

    def _common(self, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[slots] length of the prefix shared with each row's first ``lengths`` tokens, short of the last token."""
        n = len(token_ids) - 1
        if n == 0 or not self._reuse:
            return np.zeros(self.slots, dtype=np.int64)
        differs = self._ids[:, :n] != token_ids[:n]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), n)
        return np.minimum(first, lengths)

    def _longest_prefix(self, token_ids: np.ndarray) -> tuple[int, int]:
        common = self._common(token_ids, self._computed)
        best = int(common.max())
        # Among equals prefer the row that holds nothing else: it can be continued instead of copied.
        row = int(np.where(common == best, self._computed, np.iinfo(np.int64).max).argmin())
        return row, best

    def _planned_prefix(self, token_ids: np.ndarray) -> int:
        filling = self._planned > self._computed
        return int(self._common(token_ids, np.where(filling, self._planned, 0)).max()) if filling.any() else 0

    def _victim(self) -> int:
        idle = np.arange(self.active, self.slots)
        # Empty rows first, then the least recently used one.
        return int(idle[np.where(self._computed[idle] == 0, -1, self._used[idle]).argmin()])

    def _copy(self, source: int, target: int, length: int) -> None:
        if length:
            self.kv[:, :, target, :, :length].copy_(self.kv[:, :, source, :, :length])
            self._ids[target, :length] = self._ids[source, :length]
        self._computed[target] = self._planned[target] = length
        self._used[target] = self._used[source]

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        length = int(max(self._computed[a], self._computed[b]))
        if length:
            kept = self.kv[:, :, a, :, :length].clone()
            self.kv[:, :, a, :, :length].copy_(self.kv[:, :, b, :, :length])
            self.kv[:, :, b, :, :length].copy_(kept)
        for array in (self._ids, self._computed, self._planned, self._used):
            array[[a, b]] = array[[b, a]]
