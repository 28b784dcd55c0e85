"""How uncertain a sampler was, from the top log-probs an engine returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def top_entropy(top: Mapping[int, float]) -> float:
    """Entropy in nats of one position, from {token id: log-prob} of its most likely tokens.

    The tokens that are not listed count as one outcome with the probability that is left, so that the figure is a
    lower bound of the entropy over the whole vocabulary, and exact where nothing is left.

    >>> round(top_entropy({7: math.log(0.5), 9: math.log(0.25)}), 4)
    1.0397
    """
    probabilities = [math.exp(logprob) for logprob in top.values()]
    rest = 1.0 - sum(probabilities)
    if rest > 1e-9:
        probabilities.append(rest)
    return -sum(p * math.log(p) for p in probabilities if p > 0.0)


def opening_entropy(tops: Sequence[Mapping[int, float]] | None, first: int) -> float | None:
    """Mean ``top_entropy`` over the first ``first`` positions; None without any."""
    if not tops or first < 1:
        return None
    taken = [top_entropy(top) for top in tops[:first]]
    return sum(taken) / len(taken)
