"""Packs the values of a test's questions into one line of a results file, and unpacks them."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

import numpy as np

DIGITS = string.digits + string.ascii_letters


def packed(values: Sequence[float | None]) -> str:
    """Pack values into a short text ``numbers|codes``, without loss. ``numbers``: the distinct numbers in ascending
    order; ``codes``: each question's index into them in base 62. All codes have the same number of digits; dashes mean
    None.

    >>> packed([0.0, 1.0, None, 0.5])
    '0.0 0.5 1.0|02-1'
    """
    numbers = sorted({float(value) for value in values if value is not None})
    missing, *codes = _codes(len(numbers))
    code = {None: missing, **dict(zip(numbers, codes, strict=True))}
    return f"{' '.join(map(repr, numbers))}|{''.join(code[value] for value in values)}"


def unpacked(text: str) -> np.ndarray:
    """Return the values [questions] in a text that ``packed`` wrote; NaN for None."""
    numbers, _, codes = text.partition("|")
    levels = [np.nan, *map(float, numbers.split())]
    level = dict(zip(_codes(len(levels) - 1), levels, strict=True))
    width = len(next(iter(level)))
    return np.array([level[codes[i : i + width]] for i in range(0, len(codes), width)])


def _codes(numbers: int) -> Iterator[str]:
    """Yield the code of a missing value, then the codes of as many numbers."""
    width = 1
    while len(DIGITS) ** width < numbers:
        width += 1
    yield "-" * width
    yield from map("".join, itertools.islice(itertools.product(DIGITS, repeat=width), numbers))


def common_tables(runs: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return an array [runs, questions] for each measure, over the questions that have all measures in every run.
    Returns [] if a run has no measures.

    Args:
        runs: the ``packed`` measures of each run.
    """
    if not (runs and all(runs)):
        return []
    values = np.array([[unpacked(text) for text in run] for run in runs])
    return list(values[:, :, ~np.isnan(values).any(axis=(0, 1))].swapaxes(0, 1))
