"""Forward passes without gradient: micro-batches of a batch, and their results by token and by step (turn)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_modules import ranks
from lightning_modules.batch import RowTensors, TokenBatch, micro_batches, turn_starts
from lightning_modules.maths.stepwise import step_divergences, step_index, step_means, step_weights

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

StepValues = dict[str, list[float]]  # by name, one value per step
TokenValues = dict[str, list[float]]  # by name, one value per response token


class Scored:
    """Results of models, some of which an algorithm may not have declared."""

    __slots__ = ()

    def known(self, name: str) -> Tensor:
        """The field ``name``. Raises ValueError if nothing has computed it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"nothing has computed {name}; declare what does (a model, or reads_policy_scores)")
        return value


@dataclass(frozen=True, slots=True)
class Scores(Scored, RowTensors):
    """Results of the declared models on a rollout batch before the update; [B, T] float32, no gradient."""

    old_logprobs: Tensor | None  # the policy that is about to be updated, where batch.mask is 1; None: not scored
    teacher_logprobs: Tensor | None = None  # the model that is distilled, where batch.mask is 1
    reference_logprobs: Tensor | None = None  # the frozen model of the KL, where batch.mask is 1
    values: Tensor | None = None  # the critic, at every position
    entropy: Tensor | None = None  # nats, of the policy that is about to be updated, where batch.mask is 1


@dataclass(frozen=True, slots=True)
class Outputs(Scored):
    """Results of the trained models on one micro-batch, with gradient; [B, T] float32."""

    logprobs: Tensor  # where mask is 1, else 0
    entropy: Tensor  # nats, where mask is 1, else 0
    values: Tensor | None  # at every position; None without a critic


def plan(
    batch: TokenBatch, index: Sequence[int], token_budget: int, packed: bool = False
) -> list[tuple[list[int], int]]:
    """(rows, longest) per micro-batch of the rows ``index``. Every rank gets as many as the rank that needs most, empty
    ones last, so that collectives inside of models stay in step. Every rank must call."""
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
    """[*leading, B, T] from a function that gives [*leading, b, t] for a micro-batch. Every rank must call."""
    out = batch.mask.new_zeros((*leading, *batch.mask.shape))
    with torch.no_grad():
        for group, length in plan(batch, range(len(batch.lengths)), token_budget, packed):
            values = function(batch.rows(group, length))
            if group:
                out[..., torch.as_tensor(group, device=out.device), :length] = values
    return out


def values_by_token(
    rows: Sequence[Trajectory], batch: TokenBatch, tensors: Mapping[str, Tensor]
) -> list[tuple[Trajectory, TokenValues]]:
    """With each trajectory what tensors [B, T] say of its response tokens, for people to read.

    Args:
        rows: of ``batch``: trajectories, or the ``split_turns`` of them one after the other, whose values are put
            together again (0 where a token is in no row).
        batch: the tokens.
        tensors: by name.
    """
    found: list[tuple[Trajectory, TokenValues]] = []
    spans = zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
    for i, (row, (start, end)) in enumerate(zip(rows, spans, strict=True)):
        whole, first = _whole(row)
        if row.row is None or not found or found[-1][0] is not whole:
            found.append((whole, {name: [0.0] * len(whole.response_ids) for name in tensors}))
        for name, values in tensors.items():
            found[-1][1][name][first : first + end - start] = values[i, start:end].tolist()
    return found


def regrouped(
    values_BT: Tensor, rows: Sequence[Trajectory], trajectories: Sequence[Trajectory], whole: TokenBatch
) -> Tensor:
    """Values of the tokens of ``rows`` (``split_turns``, in the order of the trajectories), at the columns of
    ``whole``, the collated trajectories: [B, T], 0 elsewhere."""
    found = whole.mask.new_zeros(whole.mask.shape)
    position = {id(t): i for i, t in enumerate(trajectories)}
    for row, t in enumerate(rows):
        episode, first = _whole(t)
        start, read, n = len(episode.prompt_ids) + first, len(t.prompt_ids), len(t.response_ids)
        found[position[id(episode)], start : start + n] = values_BT[row, read : read + n]
    return found


def _whole(row: Trajectory) -> tuple[Trajectory, int]:
    """Of which trajectory this is a row, and where in its response the row's own begins; a whole one's is itself, 0."""
    if row.episode is None or row.row is None:
        return row, 0
    return row.episode, row.episode.turns[row.row].start


def values_by_step(
    trajectories: Sequence[Trajectory], batch: TokenBatch, student: Tensor, teacher: Tensor, teacher_entropy: Tensor
) -> list[StepValues]:
    """Per trajectory, a value for each of its turns that holds a token: ``divergence`` (mean |S - T| of log-probs),
    ``signed`` (mean T - S), ``weight`` (SOD's, at delta 0.2 and epsilon 1e-6) and ``teacher_entropy``; in nats.

    Args:
        trajectories: of the rows of ``batch``.
        batch: the tokens.
        student: log-probs [B, T].
        teacher: log-probs [B, T].
        teacher_entropy: of the teacher's distribution of each token [B, T].
    """
    steps = step_index(batch.mask, turn_starts(trajectories, batch))
    distances = step_divergences(student, teacher, steps)
    columns = {
        "divergence": distances.absolute,
        "weight": step_weights(distances),
        "signed": distances.signed,
        "teacher_entropy": step_means(teacher_entropy, steps)[0],
    }
    counts = (distances.tokens > 0).sum(1).tolist()
    return [{name: values[i, :k].tolist() for name, values in columns.items()} for i, k in enumerate(counts)]
