"""Bootstrap intervals and paired tests over questions, and over seeds and questions. numpy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 4_000_000  # indices drawn at once: bounds the memory for test sets of 50,000 questions


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its bootstrap interval. All NaN when ``n`` is 0."""

    mean: float
    low: float
    high: float
    n: int

    def as_json(self) -> dict[str, float | int | None]:
        """Return the interval as a dict for JSON, with null for NaN, which JSON does not have."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """``mean(a) - mean(b)`` over the same questions, its interval, and the two-sided bootstrap p-value."""

    difference: float
    low: float
    high: float
    p: float
    n: int


def _as_sample(values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise ValueError(f"{name}: found an array of shape {sample.shape}, expected one value per question")
    if not np.isfinite(sample).all():
        raise ValueError(f"{name}: {int((~np.isfinite(sample)).sum())} of {sample.size} values are not finite numbers")
    return sample


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Return the lower and upper end of the middle 95 % of resampled values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, 1 - (1 - LEVEL) / 2])
    return float(low), float(high)


def bootstrap_means(values: Sequence[float] | np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the means of ``resamples`` bootstrap samples (values chosen with replacement), shape [resamples].

    For a sample with two distinct values (EM, hits) the number of times that the larger one is chosen is binomial,
    which is the same distribution at a thousandth of the cost.
    """
    sample = _as_sample(values, "bootstrap")
    if sample.size == 0:
        raise ValueError("bootstrap: the sample is empty, expected at least one value")
    rng = np.random.default_rng(seed)
    levels = np.unique(sample)
    if levels.size == 1:
        return np.full(resamples, levels[0])
    if levels.size == 2:
        share = float((sample == levels[1]).mean())
        drawn = rng.binomial(sample.size, share, size=resamples) / sample.size
        return levels[0] + (levels[1] - levels[0]) * drawn
    rows = max(1, CHUNK // sample.size)
    parts = [
        sample[rng.integers(0, sample.size, size=(min(rows, resamples - done), sample.size))].mean(axis=1)
        for done in range(0, resamples, rows)
    ]
    return np.concatenate(parts)


def bootstrap_interval(values: Sequence[float] | np.ndarray, *, resamples: int = RESAMPLES) -> Interval:
    """Return the mean of the values with its 95 % percentile bootstrap interval. Seeded: the same values give the same
    interval.

    A sample whose values are all equal (EM 0 everywhere) has an interval of width zero; that is a property of the
    bootstrap, not certainty about the population.
    """
    sample = _as_sample(values, "bootstrap_interval")
    if sample.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    means = bootstrap_means(sample, resamples=resamples)
    return Interval(float(sample.mean()), *_ends(means), int(sample.size))


def bootstrap_strata(strata: Sequence[Sequence[float]], *, resamples: int = RESAMPLES) -> Interval:
    """Return the mean of the strata's means with its 95 % bootstrap interval, resampling within each stratum (such as a
    data source). n counts all values.

    Raises:
        ValueError: no strata, or an empty one.
    """
    if not strata:
        raise ValueError("bootstrap_strata: found no stratum, expected at least one")
    drawn = np.mean([bootstrap_means(s, resamples=resamples, seed=i) for i, s in enumerate(strata)], axis=0)
    mean = float(np.mean([np.mean(stratum) for stratum in strata]))
    return Interval(mean, *_ends(np.asarray(drawn)), sum(map(len, strata)))


def bootstrap_function(
    columns: Sequence[Sequence[float]],
    function: Callable[[np.ndarray], np.ndarray],
    *,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return ``function`` of the means of several measures, such as a ratio of two means, with its 95 % bootstrap
    interval over questions.

    Args:
        columns: one sequence per measure, each with one value per question, in the same order.
        function: from means [measures, R] to values [R]. Resamples without a finite value (a ratio with denominator
            0) are left out of the quantiles.

    Raises:
        ValueError: no measures, unequal lengths, or values (or a function at the sample means) that are not finite.
    """
    samples = [_as_sample(column, "bootstrap_function") for column in columns]
    sizes = {sample.size for sample in samples}
    if len(sizes) != 1:
        raise ValueError(f"bootstrap_function: found measures of {sorted(sizes)} values, expected as many of each")
    (size,) = sizes
    if size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    table = np.stack(samples)
    value = float(function(table.mean(axis=1, keepdims=True))[0])
    if not math.isfinite(value):
        raise ValueError(f"bootstrap_function: the function is {value} at the means of the sample")
    rng = np.random.default_rng(0)
    rows = max(1, CHUNK // size)
    parts = []
    for done in range(0, resamples, rows):
        drawn = rng.integers(0, size, size=(min(rows, resamples - done), size))
        means = np.stack([sample[drawn].mean(axis=1) for sample in samples])
        with np.errstate(divide="ignore", invalid="ignore"):
            parts.append(function(means))
    values = np.concatenate(parts)
    return Interval(value, *_ends(values[np.isfinite(values)]), size)


def bootstrap_pooled(
    rows: Sequence[tuple[Hashable, Sequence[float]]],
    function: Callable[[np.ndarray], np.ndarray] = lambda means: means[0],
    *,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return ``function`` of the means of several measures over rows, such as turns, with its 95 % bootstrap interval.
    The interval resamples questions, because rows of one question are not independent. n counts rows.

    Args:
        rows: (id of the question, one value per measure).
        function: as in `bootstrap_function`; default: the mean of the first measure.
    """
    if not rows:
        return Interval(math.nan, math.nan, math.nan, 0)
    sums: dict[Hashable, np.ndarray] = {}
    for question, measures in rows:
        sums[question] = sums.get(question, 0.0) + np.array([*measures, 1.0])
    columns = np.stack(list(sums.values())).T.tolist()
    interval = bootstrap_function(columns, lambda means: function(means[:-1] / means[-1]), resamples=resamples)
    return replace(interval, n=len(rows))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return pass@k: the probability that at least one of ``k`` of ``n`` attempts is right, if ``c`` of the ``n`` are.
    The formula is ``1 - C(n - c, k) / C(n, k)``, unbiased (arXiv 2107.03374, eq. 1), as a product, so that nothing
    overflows: ``1 - prod_{i = n - c + 1 .. n} (1 - k / i)``.

    Raises:
        ValueError: not ``0 <= c <= n`` or not ``1 <= k <= n``.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): expected 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def bootstrap_seeds(
    measures: Sequence[np.ndarray], function: Callable[[np.ndarray], np.ndarray] = lambda means: means[0]
) -> Interval:
    """Return ``function`` of the means of several measures with its 95 % bootstrap interval, which resamples both
    training seeds and questions.

    Each resample chooses seeds, then questions, the same ones for every chosen seed. n counts questions. With few seeds
    the interval is too narrow: with S seeds it contains (S - 1) / S of the variance between seeds.

    Args:
        measures: a table [seeds, questions] per measure, with the same questions in the same order.
        function: as in ``bootstrap_function``; by default the mean of one measure.

    Raises:
        ValueError: no questions, or unequal numbers of questions or seeds.
    """
    value, drawn, size = _seed_resamples(measures, function)
    return Interval(value, *_ends(drawn[np.isfinite(drawn)]), size)


def paired_bootstrap(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    *,
    same_seeds: bool = True,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Return the mean difference of two methods on the same questions, with its 95 % bootstrap interval and p-value.

    ``a`` and ``b`` have one value per question, or are tables [seeds, questions], which ``bootstrap_seeds`` resamples.

    Args:
        same_seeds: row i of both tables belongs to one seed, so rows are drawn together. False draws the rows of each
            table independently (two methods without common seeds).

    Convention of the p-value: two-sided, ``2 * min(P(d* <= 0), P(d* >= 0))`` over the resampled mean differences
    d*, with one added to numerator and denominator (so that it is never 0) and capped at 1.

    Raises:
        ValueError: unequal lengths, no pairs, or a value that is not finite.
    """
    tables = [np.atleast_2d(np.asarray(table, dtype=np.float64)) for table in (a, b)]
    value, drawn, size = _seed_resamples(tables, lambda m: m[0] - m[1], same_seeds, resamples)
    smaller = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (smaller + 1) / (resamples + 1))
    return PairedDifference(value, *_ends(drawn), p, size)


def _seed_resamples(
    measures: Sequence[np.ndarray],
    function: Callable[[np.ndarray], np.ndarray],
    same_seeds: bool = True,
    resamples: int = RESAMPLES,
) -> tuple[float, np.ndarray, int]:
    """Evaluate a function of means on bootstrap resamples of seeds and questions. Returns its value on the sample, its
    values over the resamples [R], and the number of questions."""
    tables = [np.asarray(table, dtype=np.float64) for table in measures]
    shapes = [table.shape for table in tables]
    if len({shape[1:] for shape in shapes}) > 1 or (same_seeds and len({len(table) for table in tables}) > 1):
        raise ValueError(f"bootstrap: found tables of {shapes}, expected the same seeds and questions in each")
    if tables[0].ndim != 2 or not all(table.size for table in tables):
        raise ValueError(f"bootstrap: found tables of {shapes}; do the evaluations share any question id?")
    if not all(np.isfinite(table).all() for table in tables):
        raise ValueError("bootstrap: found values that are not finite numbers")
    rng = np.random.default_rng(0)
    counts = [rng.multinomial(n, np.full(n, 1 / n), size=resamples) for n in map(len, tables)]
    if same_seeds:
        counts = [counts[0]] * len(tables)
    size = tables[0].shape[1]
    means = np.empty((len(tables), resamples))
    # Resamples that drew the same seeds share their questions' means: of few seeds there are few such draws.
    _, group = np.unique(np.concatenate(counts, axis=1), axis=0, return_inverse=True)
    for g in range(int(group.max()) + 1):
        rows = np.flatnonzero(group == g)
        drawn = np.stack([c[rows[0]] @ t / len(t) for c, t in zip(counts, tables, strict=True)])
        for part in np.array_split(rows, 1 + len(rows) * size * len(tables) // CHUNK):
            means[:, part] = drawn[:, rng.integers(0, size, size=(len(part), size))].mean(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = function(means)
    whole = np.stack([t.mean() for t in tables])[:, None]
    return float(function(whole)[0]), values, size


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for their number by Holm's method (Scandinavian Journal of
    Statistics 6, 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        corrected[i] = largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
    return corrected
