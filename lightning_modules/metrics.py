"""Figures of one training step, collected as sums so that they are right over micro-batches and ranks."""

from __future__ import annotations

from torch import Tensor

from lightning_modules import ranks


class StepMetrics:
    """Collects ``mean`` (sum, count), ``total`` and ``maximum``; ``reduce`` merges ranks and empties nothing."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}
        self._totals: dict[str, list[Tensor | float]] = {}
        self._maxima: dict[str, list[Tensor | float]] = {}

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a ratio of sums; kept on the device, so that nothing waits for the accelerator."""
        self._sums.setdefault(name, []).append((_detached(total), _detached(count)))

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a sum over micro-batches and ranks; ranks that add nothing count as 0."""
        self._totals.setdefault(name, []).append(_detached(value))

    def maximum(self, name: str, value: Tensor | float) -> None:
        self._maxima.setdefault(name, []).append(_detached(value))

    def reduce(self) -> dict[str, float]:
        """Merge over ranks (every rank must call). A mean whose count is 0 everywhere is left out."""
        sums = {k: (sum(float(s) for s, _ in v), sum(float(c) for _, c in v)) for k, v in self._sums.items()}
        totals = {k: sum(float(x) for x in v) for k, v in self._totals.items()}
        maxima = {k: max(float(x) for x in v) for k, v in self._maxima.items()}
        result: dict[str, float] = {}
        gathered = ranks.gather_objects((sums, totals, maxima))
        for name in dict.fromkeys(k for s, _, _ in gathered for k in s):  # a rank without data may lack some names
            total = sum(s[name][0] for s, _, _ in gathered if name in s)
            count = sum(s[name][1] for s, _, _ in gathered if name in s)
            if count != 0:
                result[name] = total / count
        for name in dict.fromkeys(k for _, t, _ in gathered for k in t):
            result[name] = sum(t.get(name, 0.0) for _, t, _ in gathered)
        for name in dict.fromkeys(k for _, _, m in gathered for k in m):
            result[name] = max(m[name] for _, _, m in gathered if name in m)
        return result


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
