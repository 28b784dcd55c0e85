"""Turns written down by hand, for the tests about them."""

from __future__ import annotations

from collections.abc import Sequence

from callbacks.evaluation.turn_scores import TurnScore

EPSILON, DELTA = 1e-6, 0.2


def weights_of(divergences: Sequence[float]) -> list[float]:
    """Eq. 7, as the running product that the paper writes."""
    product, weights = 1.0, [1.0]
    for before, d in zip(divergences, divergences[1:], strict=False):
        product *= (before + EPSILON) / (d + EPSILON)
        weights.append(min(product, 1 + DELTA))
    return weights


def make_scores(
    divergences: Sequence[float],
    outcomes: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    name: str = "q1",
    attempt: int = 0,
    entropies: Sequence[float] | None = None,
    acc: float | None = 1.0,
) -> list[TurnScore]:
    """One trajectory. ``weights``: default: those of the divergences."""
    count = len(divergences)
    weights = weights or weights_of(divergences)
    return [
        TurnScore(
            id=name, attempt=attempt, data_source="hand", turn=k + 1, turns=count, tokens=5,
            divergence=divergences[k], weight=weights[k], signed=-divergences[k] / 2,
            teacher_entropy=(entropies or [0.3] * count)[k], outcome=outcomes[k], acc=acc,
        )
        for k in range(count)
    ]  # fmt: skip
