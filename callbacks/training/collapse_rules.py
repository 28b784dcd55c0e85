"""Rules that tell whether a metric has collapsed; each is fed one value an iteration.

Every rule has ``update(value)``, which returns why it fires, or None. What a value is compared with is either the
running maximum (``Drop``) or the median of the last calm updates: those the rule itself did not find suspicious, so
that a collapse does not become what is normal while it is going on.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    def update(self, value: float) -> str | None: ...


@dataclass(slots=True)
class Drop:
    """Fires when a value has been below ``share`` of its running maximum for ``patience`` updates in a row.

    A maximum below ``floor`` is taken for noise: a run that never got off the ground has not collapsed.
    """

    share: float = 0.5
    patience: int = 20
    floor: float = 0.05
    best: float = -math.inf
    below: int = 0

    def update(self, value: float) -> str | None:
        self.best = max(self.best, value)
        low = self.best >= self.floor and value < self.share * self.best
        self.below = self.below + 1 if low else 0
        if self.below >= self.patience:
            return f"below {self.share:.0%} of its maximum {self.best:.3g} for {self.below} iterations, now {value:.3g}"
        return None


class AgainstCalm(ABC):
    """Fires when a value has been suspicious beside the last ``window`` calm ones for ``patience`` updates in a row.
    Nothing is suspicious before there are ``warmup`` calm values."""

    def __init__(self, patience: int = 5, window: int = 50, warmup: int = 10) -> None:
        self.patience, self.warmup = patience, warmup
        self.calm: deque[float] = deque(maxlen=window)
        self.suspicious = 0  # updates in a row

    @abstractmethod
    def judge(self, value: float, median: float) -> str | None:
        """What is suspicious about a value, beside the median of the calm ones."""

    def update(self, value: float) -> str | None:
        found = None if len(self.calm) < self.warmup else self.judge(value, statistics.median(self.calm))
        self.suspicious = 0 if found is None else self.suspicious + 1
        if found is None:
            self.calm.append(value)
        elif self.suspicious >= self.patience:
            return f"{found} for {self.suspicious} iterations, now {value:.3g}"
        return None


class Explosion(AgainstCalm):
    """A value above ``factor`` times the median; one that is not a finite number fires at once."""

    def __init__(self, factor: float, patience: int = 5, window: int = 50, warmup: int = 10) -> None:
        super().__init__(patience, window, warmup)
        self.factor = factor

    def judge(self, value: float, median: float) -> str | None:
        return f"above {self.factor:g} times its median {median:.3g}" if value > self.factor * median else None

    def update(self, value: float) -> str | None:
        return super().update(value) if math.isfinite(value) else f"not a finite number ({value})"


class Fall(AgainstCalm):
    """A value below ``share`` of the median: ``Explosion`` downwards, for values that are not negative. A median below
    ``floor`` is taken for noise.

    Half of ``window`` is about how long the median lags behind a value that changes steadily, so that with ``share``
    0.6 and ``window`` 20 a fall of more than 40 % within ten updates counts and one that takes a hundred does not.
    """

    def __init__(self, share: float, patience: int = 5, window: int = 50, warmup: int = 10, floor: float = 0.0) -> None:
        super().__init__(patience, window, warmup)
        self.share, self.floor = share, floor

    def judge(self, value: float, median: float) -> str | None:
        low = median >= self.floor and value < self.share * median
        return f"below {self.share:.0%} of its median {median:.3g}" if low else None


class Slump(AgainstCalm):
    """A value of any sign (a reward) more than ``spreads`` spreads below the median.

    The spread is what the calm values scatter by, a robust standard deviation (1.4826 times the median distance from
    the median), at least ``least``: a reward that was the same in every batch so far has none. A share of the median
    would mean nothing for a reward that may be negative.
    """

    def __init__(
        self, spreads: float, patience: int = 10, window: int = 50, warmup: int = 10, least: float = 0.02
    ) -> None:
        super().__init__(patience, window, warmup)
        self.spreads, self.least = spreads, least

    def judge(self, value: float, median: float) -> str | None:
        spread = max(1.4826 * statistics.median(abs(calm - median) for calm in self.calm), self.least)
        low = value < median - self.spreads * spread
        return f"more than {self.spreads:g} spreads ({spread:.3g}) below its median {median:.3g}" if low else None
