"""Pads trajectories to tensors, splits batches into micro-batches, and runs models over them.

Convention in lightning_modules: per-token tensors are [B, T] and aligned with token positions. Entry t belongs to token
t given the tokens before it, so entry 0 is always 0. Rows are padded on the right. Masks come from lengths and from
``Trajectory.loss_mask``, never from pad ids (a genuine EOS may be the pad id).

::

    position          0   1   2   3   4   5   6   7
    input_ids         p0  p1  p2  y0  y1  o0  y2  pad      prompt, sampled, observation, sampled
    mask              0   0   0   1   1   0   1   0        the policy's own tokens
    response_mask     0   0   0   1   1   1   1   0        everything after the prompt
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from common import ranks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rollout.trajectory import Trajectory


class RowTensors:
    """Base of frozen dataclasses of tensors with one row per trajectory, from which rows can be selected. Fields are
    tensors [B] or [B, T], other ``RowTensors`` of the same rows, tuples of them, or None."""

    __slots__ = ()

    def rows(self, index: Sequence[int], length: int) -> Self:
        """Return a copy with the rows ``index``, and the first ``length`` columns of [B, T] tensors.

        An empty ``index`` selects a stand-in: one row of zeros with one column. It runs through every model and adds
        nothing to masked sums, so collectives match those of ranks that have more micro-batches.
        """
        return dataclasses.replace(
            cast("Any", self), **{name: _taken(value, index, length) for name, value in _fields(self)}
        )


def _fields(rows: RowTensors) -> list[tuple[str, Any]]:
    return [(field.name, getattr(rows, field.name)) for field in dataclasses.fields(cast("DataclassInstance", rows))]


def _taken(value: Any, index: Sequence[int], length: int) -> Any:
    if isinstance(value, RowTensors):
        return value.rows(index, length)
    if isinstance(value, tuple):
        return tuple(_taken(one, index, length) for one in value)
    if not isinstance(value, Tensor):
        return value
    if len(index) == 0:
        return value.new_zeros((1,) if value.dim() == 1 else (1, 1))
    taken = value[torch.as_tensor(index, device=value.device)]
    return taken if value.dim() == 1 else taken[:, :length]


@dataclass(frozen=True, slots=True)
class TokenRows(RowTensors):
    """Values of the policy's own tokens, without padding: of each row [n_b, ...], n_b its tokens where the mask is 1.
    For what is too large for [B, T, ...], such as log-probs of many tokens at each position."""

    by_row: tuple[Tensor, ...]
    none: Tensor  # [0, ...], the shape of a batch without tokens

    def rows(self, index: Sequence[int], length: int) -> TokenRows:
        return TokenRows(tuple(self.by_row[i] for i in index), self.none)

    @property
    def joined(self) -> Tensor:
        """The values of all rows, one after the other [N, ...], as ``policy.positions`` orders tokens."""
        return torch.cat([self.none, *self.by_row])

    def column(self, number: int, mask: Tensor) -> Tensor:
        """Return one value per token [B, T] float32, for the mask [B, T] of the tokens; 0 elsewhere."""
        found = torch.zeros(mask.shape, device=mask.device)
        found[mask != 0] = self.joined[:, number].float()
        return found

    def beside(self, other: TokenRows) -> TokenRows:
        """Return the values of both for each token, one after the other."""
        rows = (torch.cat(pair, dim=1) for pair in zip(self.by_row, other.by_row, strict=True))
        return TokenRows(tuple(rows), torch.cat([self.none, other.none], dim=1))

    def columns(self, first: int, last: int | None, dtype: torch.dtype | None = None) -> TokenRows:
        """Return the values from number ``first`` to before ``last`` of each token, in another type if one is named."""
        return self.mapped(lambda rows: rows[:, first:last].to(dtype or rows.dtype, copy=True))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> TokenRows:
        """Return the values of ``function`` of each row [n_b, ...]."""
        return TokenRows(tuple(map(function, self.by_row)), function(self.none))


def without_token_rows(rows: Any) -> Any:
    """Return a copy of a dataclass of tensors in which ``TokenRows``, which may be large, are None."""
    if isinstance(rows, TokenRows):
        return None
    if isinstance(rows, tuple):
        return tuple(without_token_rows(one) for one in rows)
    if not isinstance(rows, RowTensors):
        return rows
    return dataclasses.replace(cast("Any", rows), **{name: without_token_rows(value) for name, value in _fields(rows)})


def tensors_BT(rows: RowTensors) -> dict[str, Tensor]:
    """Return the per-token tensors [B, T] of a dataclass by field name, nested ones included. Integer tensors (numbers
    of turns) are left out."""
    found: dict[str, Tensor] = {}
    for name, value in _fields(rows):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, RowTensors):
                found |= tensors_BT(one)
            elif isinstance(one, Tensor) and one.dim() == 2 and one.is_floating_point():
                found[name] = one
    return found


@dataclass(frozen=True, slots=True)
class TokenBatch(RowTensors):
    """B trajectories as padded tensors. The module docstring shows a picture."""

    input_ids: Tensor  # [B, T] int64, right-padded with 0
    lengths: Tensor  # [B] int64, prompt + response
    prompt_lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] float32, 1 where the policy sampled the token
    sampler_logprobs: Tensor  # [B, T] float32, the engine's log-prob where mask is 1, else 0

    @property
    def response_mask(self) -> Tensor:
        """Mask [B, T] float32 of the response: 1 from the first response token to the last, observations included."""
        position = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        return ((position >= self.prompt_lengths[:, None]) & (position < self.lengths[:, None])).to(self.mask.dtype)


def collate(trajectories: Sequence[Trajectory], device: torch.device | str = "cpu") -> TokenBatch:
    """Pad trajectories to one ``TokenBatch``, a row for each. Without trajectories the tensors have no rows.

    Raises:
        ValueError: if a trajectory is empty or has no prompt (its first token would have nothing to be predicted from).
    """
    for t in trajectories:
        if not t.prompt_ids:
            raise ValueError(f"trajectory {t.group}/{t.index} has no prompt ids; at least one is needed")
    return token_batch([(t.prompt_ids, t.response_ids, t.loss_mask, t.logprobs) for t in trajectories], device)


def token_batch(rows: Sequence[Sequence[Any]], device: torch.device | str = "cpu") -> TokenBatch:
    """Pad rows of (prompt ids, response ids, mask of the response, log-probs of the sampler) to one ``TokenBatch``.
    Without log-probs they are 0."""
    lengths = [len(row[0]) + len(row[1]) for row in rows]
    shape = (len(rows), max(lengths, default=1))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    mask, sampler = torch.zeros(shape), torch.zeros(shape)
    for i, ((prompt, response, own, *logprobs), length) in enumerate(zip(rows, lengths, strict=True)):
        start = len(prompt)
        input_ids[i, :length] = torch.tensor((*prompt, *response))
        mask[i, start:length] = torch.tensor(own, dtype=torch.float32)
        if logprobs:
            sampler[i, start:length] = torch.tensor(logprobs[0], dtype=torch.float32)
    prompts = torch.tensor([len(row[0]) for row in rows], dtype=torch.int64)
    ends = torch.tensor(lengths, dtype=torch.int64)
    return TokenBatch(*(x.to(device) for x in (input_ids, ends, prompts, mask, sampler * mask)))


def with_prompts(trajectories: Sequence[Trajectory], prompts: Sequence[Sequence[int]], like: TokenBatch) -> TokenBatch:
    """Build a ``TokenBatch`` from the trajectories' responses and other prompts, on the device of ``like``. ``aligned``
    moves values back to the columns of the original batch."""
    changed = [t.replace(prompt_ids=tuple(ids)) for t, ids in zip(trajectories, prompts, strict=True)]
    return collate(changed, like.input_ids.device)


def aligned(values_BT: Tensor, source: TokenBatch, target: TokenBatch) -> Tensor:
    """Move values of response tokens from their columns in batch ``source`` to those in batch ``target``.

    ``target`` has the same responses after other prompts. The result is 0 where ``target`` has no response token.
    """
    position = torch.arange(target.input_ids.shape[1], device=values_BT.device)[None]
    moved_from = position + (source.prompt_lengths - target.prompt_lengths)[:, None]
    moved = values_BT.gather(1, moved_from.clamp(0, values_BT.shape[1] - 1))
    return torch.where(target.response_mask != 0, moved, torch.zeros_like(moved))


def micro_batches(
    lengths: Sequence[int], index: Sequence[int], token_budget: int, packed: bool = False
) -> list[list[int]]:
    """Split the rows ``index`` into micro-batches (lists of row numbers) of at most ``token_budget`` tokens, padding
    included.

    Rows are sorted by length to reduce padding; a row longer than the budget gets a micro-batch for itself. Packed rows
    have no padding: the longest first, each joins the first micro-batch with enough budget left. The split changes
    memory and speed, never the gradient.

    >>> micro_batches([5, 9, 4, 5], [0, 1, 2, 3], token_budget=10)
    [[2, 0], [3], [1]]
    >>> micro_batches([5, 9, 4, 5], [0, 1, 2, 3], token_budget=10, packed=True)
    [[1], [0, 3], [2]]

    Raises:
        ValueError: budget below 1.
    """
    if token_budget < 1:
        raise ValueError(
            f"max_tokens_per_micro_batch is {token_budget}; expected at least 1 (some times the longest row)"
        )
    if packed:
        return _first_fit(lengths, index, token_budget)
    groups: list[list[int]] = []
    for row in sorted(index, key=lambda i: (lengths[i], i)):
        if groups and lengths[row] * (len(groups[-1]) + 1) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _first_fit(lengths: Sequence[int], index: Sequence[int], token_budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    free: list[int] = []  # tokens left of each group's budget
    for row in sorted(index, key=lambda i: (-lengths[i], i)):
        group = next((k for k, left in enumerate(free) if lengths[row] <= left), len(groups))
        if group == len(groups):
            groups.append([])
            free.append(token_budget)
        groups[group].append(row)
        free[group] -= lengths[row]
    return groups


# ---------------------------------------------------------------------- forward passes over a batch
class Scored:
    """Base of dataclasses with the outputs of several models. A field is None if the algorithm does not declare the
    model."""

    __slots__ = ()

    def require(self, name: str) -> Tensor:
        """Return the tensor in field ``name``. Raises ValueError if no model has computed it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"no model has computed {name}; declare the model, or reads_old_logprobs")
        return value


@dataclass(frozen=True, slots=True)
class LogprobBatch(Scored, RowTensors):
    """Log-probs, values and entropies of a rollout batch before the update; [B, T] float32, no gradient."""

    old_logprobs: Tensor | None  # of the policy before the update, where batch.mask is 1, or None
    teacher_logprobs: Tensor | None = None  # of each row's first teacher, where batch.mask is 1; 0 in rows without one
    reference_logprobs: Tensor | None = None  # of the frozen model of the KL, where batch.mask is 1
    values: Tensor | None = None  # of the critic, at every position
    entropy: Tensor | None = None  # nats, of the policy before the update, where batch.mask is 1
    judged: tuple[RowTensors | None, ...] = ()  # what the teacher of each advantage transform says


@dataclass(frozen=True, slots=True)
class PolicyOutputs(Scored):
    """Log-probs, entropies and values of one micro-batch from the trained models, with gradient; [B, T] float32."""

    logprobs: Tensor  # where mask is 1, else 0
    entropy: Tensor  # nats, where mask is 1, else 0
    values: Tensor | None  # at every position; None without a critic
    read: tuple[Tensor | None, ...] = ()  # [N, K] float32, what each advantage transform's ``reading`` asked for


def plan(
    batch: TokenBatch, index: Sequence[int], token_budget: int, packed: bool = False
) -> list[tuple[list[int], int]]:
    """Split the rows ``index`` into micro-batches, each given as (row numbers, length of the longest row).

    Every rank gets as many micro-batches as the rank that needs most, with empty ones last, so that collectives inside
    models stay equal. Every rank must call.
    """
    lengths = batch.lengths.tolist()
    groups = micro_batches(lengths, index, token_budget, packed)
    groups += [[]] * (ranks.max_over_ranks(len(groups), batch.mask.device) - len(groups))
    return [(group, max((lengths[i] for i in group), default=1)) for group in groups]


def score(
    batch: TokenBatch,
    function: Callable[[TokenBatch], Tensor],
    token_budget: int,
    leading: tuple[int, ...] = (),
    packed: bool = False,
) -> Tensor:
    """Apply a function to every micro-batch without gradient, and join the results to one tensor [*leading, B, T]. The
    function returns [*leading, b, t].

    Every rank must call.
    """
    out = batch.mask.new_zeros((*leading, *batch.mask.shape))
    with torch.no_grad():
        for group, length in plan(batch, range(len(batch.lengths)), token_budget, packed):
            values = function(batch.rows(group, length))
            if group:
                out[..., torch.as_tensor(group, device=out.device), :length] = values
    return out


def score_tokens(
    batch: TokenBatch,
    function: Callable[[TokenBatch, Sequence[int]], Tensor],
    token_budget: int,
    packed: bool = False,
) -> TokenRows:
    """Apply a function to every micro-batch without gradient, and return its values of the policy's own tokens by row.

    Every rank must call.

    Args:
        batch: the tokens.
        function: of a micro-batch and its row numbers; returns a row of values for each token where the mask is 1 [n,
            ...], in the order of ``policy.positions``.
        token_budget: tokens of a micro-batch.
        packed: whether rows have no padding.
    """
    found: dict[int, Tensor] = {}
    none = torch.empty(0)
    with torch.no_grad():
        # Without rows on any rank a stand-in shows the shape of the values.
        for group, length in plan(batch, range(len(batch.lengths)), token_budget, packed) or [([], 1)]:
            micro = batch.rows(group, length)
            values = function(micro, group)
            none = values[:0]
            if group:
                counts = (micro.mask != 0).sum(1).tolist()
                found |= dict(zip(group, values.split(counts), strict=True))
    return TokenRows(tuple(found[row] for row in range(len(batch.lengths))), none)
