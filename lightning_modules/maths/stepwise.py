"""Steps of a trajectory, how far two models are apart on them, what their signal weighs: torch only, no gradient.

A step is one turn of the model. ``steps_BT`` says of every token to which step it belongs; values of steps are
[B, K], K the most steps a row has, column k - 1 for step k::

    mask      0 1 1 1 0 0 1 1 0 1 0        prompt, turn, observation, turn, observation, turn, padding
    steps     0 1 1 1 0 0 2 2 0 3 0

Source: SOD (arXiv 2605.07725, eq. 6 and 7), docs/papers/sod.md 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Reference = Literal["first", "batch_median"]
Gather = Callable[[Tensor], Tensor]  # [n] of this rank -> [N] of all ranks


@dataclass(frozen=True, slots=True)
class StepDivergences:
    """How far student S and teacher T are apart on each step; [B, K] float32, 0 where a row has no such step."""

    absolute: Tensor  # d_k: mean |S - T| of log-probs, nats
    signed: Tensor  # mean T - S, nats; above 0 where the teacher likes the tokens more
    tokens: Tensor  # how many tokens the step has; 0: there is no such step


def step_index(mask_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
    """The step of each token [B, T] int64: 0 where the mask is 0, else 1..K.

    A step begins where the mask turns from 0 to 1, and at every token that ``starts_BT`` marks: without it, turns with
    nothing between them are one step.

    >>> step_index(torch.tensor([[0, 1, 1, 0, 1, 1]]), torch.tensor([[0, 1, 0, 0, 1, 1]])).tolist()
    [[0, 1, 1, 0, 2, 3]]
    """
    on = mask_BT != 0
    begins = on.clone()
    begins[:, 1:] &= ~on[:, :-1]
    if starts_BT is not None:
        begins |= on & (starts_BT != 0)
    return begins.long().cumsum(1) * on


def step_means(values_BT: Tensor, steps_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over each step's tokens and their number, both [B, K] float32; summed in float64.

    Values outside of steps may be anything, NaN included.
    """
    most = int(steps_BT.max()) if steps_BT.numel() else 0
    on = steps_BT > 0
    sums = torch.zeros((len(steps_BT), most + 1), dtype=torch.float64, device=values_BT.device)
    counts = sums.clone()
    sums.scatter_add_(1, steps_BT, values_BT.double().masked_fill(~on, 0.0))
    counts.scatter_add_(1, steps_BT, on.double())
    sums, counts = sums[:, 1:], counts[:, 1:]
    return (sums / counts.clamp(min=1.0)).float(), counts.float()


def step_divergences(student_BT: Tensor, teacher_BT: Tensor, steps_BT: Tensor) -> StepDivergences:
    """Eq. 6: d_k = mean over the tokens of step k of |log pi_S - log pi_T|, on the tokens the student sampled."""
    difference = teacher_BT - student_BT
    absolute, tokens = step_means(difference.abs(), steps_BT)
    return StepDivergences(absolute, step_means(difference, steps_BT)[0], tokens)


def step_weights(
    divergences: StepDivergences,
    delta: float | None = 0.2,
    epsilon: float = 1e-6,
    reference: Reference = "first",
    floor: float = 0.0,
    gather: Gather = lambda values: values,
) -> Tensor:
    """What the signal of each step weighs [B, K], 0 where a row has no such step (eq. 7, telescoped)::

        w_1 = 1        w_k = max(floor, min((d_ref + epsilon) / (d_k + epsilon), 1 + delta))

    The paper writes a running product of neighbours' ratios; it is not clipped itself, so that it is the ratio to step
    1 (docs/papers/sod.md 1.2). While no bound takes hold, w_k d_k is d_ref: every step has the same mean |w (T - S)|.

    Args:
        divergences: of whole rows: every step of a trajectory.
        delta: how far above 1 a weight may get; None for no bound.
        epsilon: keeps the ratio finite.
        reference: d_ref. ``first``: d_1 of the same row (the paper). ``batch_median``: the median of d_1 over the
            batch. A short first turn makes a noisy d_1, by which the whole trajectory would be scaled
            (docs/papers/sod.md 1.6).
        floor: least weight; 0 for the paper's.
        gather: brings the first steps' divergences of all ranks together; every rank must call.

    Raises:
        ValueError: unknown reference.
    """
    d, exists = divergences.absolute, divergences.tokens > 0
    if reference not in get_args(Reference):
        raise ValueError(f"unknown reference '{reference}'; expected {' or '.join(get_args(Reference))}")
    level: Tensor | float = 0.0
    if reference != "first":  # a collective: before any return
        everywhere = gather(d[:, :1][exists[:, :1]])
        if len(everywhere):
            level = torch.quantile(everywhere, 0.5)
    if d.shape[1] == 0:
        return d
    first = d[:, :1]
    if reference != "first":
        first = torch.full_like(first, float(level))
    weights = ((first + epsilon) / (d + epsilon)).clamp(min=floor, max=None if delta is None else 1.0 + delta)
    weights[:, 0] = 1.0
    return weights * exists


def spread(values_BK: Tensor, steps_BT: Tensor) -> Tensor:
    """Give every token the value of its step [B, T]; 0 outside of steps."""
    return torch.nn.functional.pad(values_BK, (1, 0)).gather(1, steps_BT)


def last_step(values_BK: Tensor, tokens_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The value of each row's last step [B], and which rows have a step at all [B] bool."""
    count = (tokens_BK > 0).sum(1)
    if tokens_BK.shape[1] == 0:
        return tokens_BK.new_zeros(len(tokens_BK)), count > 0
    return values_BK.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], count > 0
