"""SDAR's gates, which scale a self-teacher's signal by token, and their metrics. Torch only, no gradient.

A teacher with skills in its prompt and the student score the same sampled token y_t: T = log pi_T(y_t | s_t^+),
S = log pi_theta(y_t | s_t). The gap is Delta_t = T - S in nats, above 0 where the teacher prefers the token.

Shapes as in losses.py. Source: SDAR (arXiv 2605.15155; docs/algorithms/sdar.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

GateKind = Literal["gap", "entropy", "soft_or"]


def token_gap(logprobs_BT: Tensor, teacher_logprobs_BT: Tensor, clamp: float | None = None) -> Tensor:
    """Return the gap T - S between teacher's and student's log-probs [B, T] in nats, without gradient. With ``clamp``
    it is bounded to +-``clamp``.

    SDAR takes S from the training forward (not the log-probs before the update) and clamps nothing.

    Raises:
        ValueError: a clamp that is not above 0.
    """
    if clamp is not None and clamp <= 0:
        raise ValueError(f"clamp of the gap is {clamp}; expected a number above 0 (nats) or null")
    gap = teacher_logprobs_BT.detach() - logprobs_BT.detach()
    return gap if clamp is None else gap.clamp(-clamp, clamp)


def gate(kind: GateKind, gap_BT: Tensor | None, entropy_BT: Tensor | None, beta: float = 5.0) -> Tensor:
    """Return SDAR's gate of each token [B, T], g_t = sigmoid(beta x_t), between 0 and 1, without gradient
    (docs/algorithms/sdar.md)::

        gap        x = Delta                            the released gate, beta 5
        entropy    x = h                                h >= 0, so that g >= 0.5
        soft_or    x = 1 - (1 - h)(1 - Delta)  =  h + Delta - h Delta

    Their effects, with l = -g log pi as the loss (``sdar_loss``) and y drawn from the student:

    * beta 0, or the entropy gate at any beta: g does not depend on y, and E[g grad log pi] = g E[grad log pi] = 0.
      The teacher has no effect on the gradient, which pushes up every sampled token (docs/algorithms/sdar.md).
    * the gap gate rises with u = pi_T / pi, and so the expected gradient is that of an f-divergence to the teacher
      (self_distillation.py), whose minimum is the teacher: at beta 1 that of KL(pi_T || (pi_T + pi) / 2).
    * soft_or in nats: dx/dDelta = 1 - h. Above 1 nat of entropy, a token that the teacher prefers *lowers* the gate,
      and the expected gradient points away from the teacher. As an OR of two shares it expects both within [0, 1]. The
      paper does not say whether the authors normalise (docs/algorithms/sdar.md); to do so, pass h / log V and a gap
      scaled to [0, 1].

    Args:
        kind: see above.
        gap_BT: Delta in nats; not read by ``entropy``.
        entropy_BT: the student's entropy h over the whole vocabulary in nats; not read by ``gap``.
        beta: sharpness, at least 0.

    Raises:
        ValueError: unknown kind, a missing input of the kind, or beta below 0.
    """
    if kind not in ("gap", "entropy", "soft_or"):
        raise ValueError(f"unknown gate '{kind}'; expected gap, entropy or soft_or")
    if beta < 0:
        raise ValueError(f"beta of the gate is {beta}; expected 0 or more (SDAR takes 5)")
    if kind == "gap":
        return torch.sigmoid(beta * _read(kind, "gap_BT", gap_BT))
    if kind == "entropy":
        return torch.sigmoid(beta * _read(kind, "entropy_BT", entropy_BT))
    gap, entropy = _read(kind, "gap_BT", gap_BT), _read(kind, "entropy_BT", entropy_BT)
    return torch.sigmoid(beta * (entropy + gap - entropy * gap))


def _read(kind: GateKind, name: str, values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError(f"gate '{kind}' reads {name}, which is None; pass it")
    return values.detach()


def gate_mean(gate_BT: Tensor, mask_BT: Tensor, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """Return the mean of SDAR's gate over the tokens whose mask is not 0; 0 without any. Every rank must call.

    A *centred* gate is ``gate - gate_mean``. As a baseline, the mean keeps the expected gradient (up to the share 1/n
    of a token in the mean) and removes the push on every sampled token, which at beta 0 would sharpen the student at
    random.

    Compute it once, over the whole batch of an iteration, from the log-probs before the update, and subtract the same
    number in every micro-batch. With a mean of each micro-batch the gradient would depend on the split.

    Args:
        gate_BT: as ``gate`` returns it.
        mask_BT: which tokens count; entries where it is 0 may be NaN.
        reduce: adds a small tensor of sums over ranks; the default is one rank.
    """
    on = mask_BT != 0
    total, count = reduce(torch.stack([gate_BT.detach().double().masked_fill(~on, 0.0).sum(), on.sum().double()]))
    return (total / count.clamp(min=1.0)).to(gate_BT.dtype)


def turn_parts(turns_BT: Tensor, parts: int = 3) -> Tensor:
    """Return in which part of its turn each token is [B, T] int64: 1..``parts``, 0 outside of turns. The parts are
    about equally long.

    The middle of a token decides: token j of n (from 0) is in stretch floor(parts (j + 1/2) / n) + 1. The only token of
    a turn is in the middle stretch.

    >>> turn_parts(torch.tensor([[0, 1, 1, 1, 0, 2, 2, 0, 3]])).tolist()
    [[0, 1, 2, 3, 0, 1, 3, 0, 2]]

    Args:
        turns_BT: number of each token's turn from 1, 0 outside (``distillation.turn_index``). Along a row the numbers
            do not fall, and may leave some out.
    """
    if turns_BT.numel() == 0:
        return torch.zeros_like(turns_BT)
    on = turns_BT > 0
    lengths = torch.zeros((len(turns_BT), int(turns_BT.max()) + 1), dtype=torch.int64, device=turns_BT.device)
    lengths.scatter_add_(1, turns_BT, on.long())
    before = lengths.cumsum(1) - lengths  # tokens of earlier turns
    index = on.long().cumsum(1) - 1 - before.gather(1, turns_BT)
    length = lengths.gather(1, turns_BT).clamp(min=1)
    return torch.where(on, parts * (2 * index + 1) // (2 * length) + 1, 0)


def gate_metrics(
    gap_BT: Tensor, gate_BT: Tensor, turns_BT: Tensor, parts: int = 3, shown_turns: int = 8
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return metrics of SDAR's gates (token weights) by name, as sums and counts of tokens. ``metrics.mean`` divides
    them over micro-batches and ranks.

    Names: ``gap`` (mean Delta, nats), ``gate`` (mean g), ``gate_active`` (share with g > 0.5, at the gap gate the share
    with Delta > 0); each of them over all tokens and, as ``<name>/part<k>``, over the k-th of ``parts`` stretches of a
    turn, and as ``<name>/turn<k>`` by number of the turn, those above ``shown_turns`` together as ``<name>/later``.
    The authors show means of the gap that fall within a turn and over turns.

    Args:
        gap_BT: Delta; may be anything outside of turns.
        gate_BT: g, not centred.
        turns_BT: by token, the number of its turn from 1, 0 outside. Where a row is one turn: its number times the
            mask; where it is a whole trajectory: ``distillation.turn_index``.
    """
    on = turns_BT > 0
    turn = turns_BT[on].clamp(max=shown_turns + 1) - 1
    part = turn_parts(turns_BT, parts)[on] - 1
    ones = torch.ones(len(turn), dtype=torch.float64, device=turns_BT.device)
    by_turn, by_part = (ones.new_zeros(n) for n in (shown_turns + 1, parts))
    turn_counts, part_counts = by_turn.index_add(0, turn, ones), by_part.index_add(0, part, ones)
    gates = gate_BT.detach()[on].double()
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    active = (gates > 0.5).double()
    for name, values in (("gap", gap_BT.detach()[on].double()), ("gate", gates), ("gate_active", active)):
        metrics[name] = (values.sum(), ones.sum())
        sums = by_part.index_add(0, part, values)
        metrics |= {f"{name}/part{k + 1}": (sums[k], part_counts[k]) for k in range(parts)}
        sums = by_turn.index_add(0, turn, values)
        for k in range(shown_turns + 1):
            which = f"turn{k + 1}" if k < shown_turns else "later"
            metrics[f"{name}/{which}"] = (sums[k], turn_counts[k])
    return metrics
