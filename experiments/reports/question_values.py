"""Packs the values of a test's questions into one line of a results file, and unpacks them."""

from __future__ import annotations

import string
from collections.abc import Sequence

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
    width, places = _width(len(numbers)), {number: place for place, number in enumerate(numbers)}

    def code(value: float | None) -> str:
        if value is None:
            return "-" * width
        return "".join(DIGITS[places[value] // len(DIGITS) ** p % len(DIGITS)] for p in reversed(range(width)))

    return f"{' '.join(map(repr, numbers))}|{''.join(map(code, values))}"


def unpacked(text: str) -> np.ndarray:
    """Return the values [questions] in a text that ``packed`` wrote; NaN for None."""
    numbers, _, codes = text.partition("|")
    levels = np.array([*map(float, numbers.split()), np.nan])
    width = _width(len(levels) - 1)
    place = {digit: i for i, digit in enumerate(DIGITS)}
    found = np.full(len(codes) // width, len(levels) - 1)
    for i in range(len(found)):
        if codes[i * width] != "-":
            found[i] = sum(place[codes[(i + 1) * width - 1 - p]] * len(DIGITS) ** p for p in range(width))
    return levels[found]


def _width(numbers: int) -> int:
    width = 1
    while len(DIGITS) ** width < numbers:
        width += 1
    return width


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
