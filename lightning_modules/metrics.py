"""Metrics of one training step, kept as sums so that they are exact over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from common import ranks

Merge = Callable[[Iterable[float]], float]


class StepMetrics:
    """Collects the metrics of one training step (means, deviations, totals, maxima, minima). ``reduce`` merges them
    over ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}
        self._moments: dict[str, list[Tensor]] = {}  # number, sum, sum of squares
        # By what merges them, over micro-batches and then over ranks.
        self._merged: dict[Merge, dict[str, list[Tensor | float]]] = {sum: {}, max: {}, min: {}}

    def __contains__(self, name: str) -> bool:
        """Return whether a mean of this name has been added."""
        return name in self._sums

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add ``total`` and ``count`` to a mean metric, which is reported as the sum of totals divided by the sum of
        counts. The sums stay on the device, so this does not wait for the accelerator."""
        self._sums.setdefault(name, []).append((_detached(total), _detached(count)))

    def deviation(self, name: str, values: Tensor) -> None:
        """Add values [n] to a metric that is their standard deviation (n in the denominator)."""
        x = values.detach().double()
        moments = torch.stack([x.new_tensor(float(x.numel())), x.sum(), x.square().sum()])
        self._moments.setdefault(name, []).append(moments)

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a metric that is a sum over micro-batches and ranks. Ranks that add nothing count as 0."""
        self._merged[sum].setdefault(name, []).append(_detached(value))

    def maximum(self, name: str, value: Tensor | float) -> None:
        self._merged[max].setdefault(name, []).append(_detached(value))

    def minimum(self, name: str, value: Tensor | float) -> None:
        self._merged[min].setdefault(name, []).append(_detached(value))

    def reduce(self) -> dict[str, float]:
        """Return all metrics by name, merged over ranks (every rank must call). Means and deviations with count 0 on
        all ranks are left out."""
        sums = {k: (sum(float(s) for s, _ in v), sum(float(c) for _, c in v)) for k, v in self._sums.items()}
        moments = {k: torch.stack(v).sum(0).tolist() for k, v in self._moments.items()}
        merged = [{k: merge(map(float, v)) for k, v in values.items()} for merge, values in self._merged.items()]
        result: dict[str, float] = {}
        all_sums, all_moments, *all_merged = zip(*ranks.gather_objects((sums, moments, *merged)), strict=True)
        for name in _names(all_sums):  # a rank without data may lack some names
            total, count = (sum(s[name][i] for s in all_sums if name in s) for i in (0, 1))
            if count != 0:
                result[name] = total / count
        for name in _names(all_moments):
            count, total, squares = (sum(m[name][i] for m in all_moments if name in m) for i in (0, 1, 2))
            if count != 0:
                result[name] = max(squares / count - (total / count) ** 2, 0.0) ** 0.5
        for merge, parts in zip(self._merged, all_merged, strict=True):
            for name in _names(parts):
                result[name] = merge(part[name] for part in parts if name in part)
        return result


def _names(parts: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
