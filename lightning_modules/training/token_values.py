"""Values of a batch for people to read: by response token (trajectory pages) and by turn (turn divergences)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_modules.advantage_transforms.distillation import (
    divergence_ratios,
    turn_divergences,
    turn_index,
    turn_means,
    turn_starts,
)
from lightning_modules.batch import TokenBatch

if TYPE_CHECKING:
    from rollout.trajectory import Trajectory

TurnValues = dict[str, list[float]]  # by name, one value per turn
TokenValues = dict[str, list[float]]  # by name, one value per response token


def values_by_token(
    rows: Sequence[Trajectory], batch: TokenBatch, tensors: Mapping[str, Tensor]
) -> list[tuple[Trajectory, TokenValues]]:
    """Return each trajectory with the values of its response tokens by name, taken from tensors [B, T].

    Args:
        rows: of ``batch``: trajectories, or their ``split_turns`` one after the other. Values of turn rows are joined
            again by trajectory, with 0 for tokens outside of all rows.
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
    """Move per-token values from rows of single turns to whole trajectories. ``rows`` come from ``split_turns`` in the
    order of the trajectories; the result has the columns of ``whole``, the collated trajectories: [B, T], 0
    elsewhere."""
    found = whole.mask.new_zeros(whole.mask.shape)
    position = {id(t): i for i, t in enumerate(trajectories)}
    for row, t in enumerate(rows):
        episode, first = _whole(t)
        start, read, n = len(episode.prompt_ids) + first, len(t.prompt_ids), len(t.response_ids)
        found[position[id(episode)], start : start + n] = values_BT[row, read : read + n]
    return found


def _whole(row: Trajectory) -> tuple[Trajectory, int]:
    """Return the whole trajectory that a row belongs to, and the offset of the row's response in it (0 for a whole
    one)."""
    if row.episode is None or row.row is None:
        return row, 0
    return row.episode, row.episode.turns[row.row].start


def values_by_turn(
    trajectories: Sequence[Trajectory], batch: TokenBatch, student: Tensor, teacher: Tensor, teacher_entropy: Tensor
) -> list[TurnValues]:
    """Return how far student S and teacher T differ on every turn that holds a token, for each trajectory.

    The values are ``divergence`` (mean |S - T| of log-probs), ``signed`` (mean T - S), ``weight`` (SOD's, at delta 0.2
    and epsilon 1e-6) and ``teacher_entropy``, in nats.

    Args:
        trajectories: of the rows of ``batch``.
        batch: the tokens.
        student: log-probs [B, T].
        teacher: log-probs [B, T].
        teacher_entropy: of the teacher's distribution of each token [B, T].
    """
    turns = turn_index(batch.mask, turn_starts(trajectories, batch))
    distances = turn_divergences(student, teacher, turns)
    columns = {
        "divergence": distances.absolute,
        "weight": divergence_ratios(distances),
        "signed": distances.signed,
        "teacher_entropy": turn_means(teacher_entropy, turns)[0],
    }
    counts = (distances.tokens > 0).sum(1).tolist()
    return [{name: values[i, :k].tolist() for name, values in columns.items()} for i, k in enumerate(counts)]
