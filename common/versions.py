"""Policy versions by token, where a weight update came in the middle: runs of (policy version, tokens), in order.

Empty runs mean that one version sampled everything, which is then named beside them (``policy_version``).
"""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same tokens in as few runs as possible, none of them empty.

    >>> merged([(3, 2), (3, 1), (4, 0), (5, 2)])
    ((3, 3), (5, 2))
    """
    kept: list[tuple[int, int]] = []
    for version, count in runs:
        if count and kept and kept[-1][0] == version:
            kept[-1] = (version, kept[-1][1] + count)
        elif count:
            kept.append((version, count))
    return tuple(kept)


def runs_of(policy_version: int, runs: Runs, count: int) -> Runs:
    """Runs that cover the first ``count`` tokens, also where ``runs`` is empty.

    >>> runs_of(7, (), 3), runs_of(5, ((4, 2), (5, 3)), 3)
    (((7, 3),), ((4, 2), (5, 1)))
    """
    left, kept = count, []
    for version, length in runs or ((policy_version, count),):
        kept.append((version, min(length, left)))
        left -= kept[-1][1]
    return merged(kept)


def recorded(runs: Runs) -> Runs:
    """What is kept of merged runs: nothing, where they name one version only."""
    return runs if len(runs) > 1 else ()
