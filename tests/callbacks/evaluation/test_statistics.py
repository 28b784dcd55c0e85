from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from callbacks.evaluation.statistics import (
    Interval,
    bootstrap_function,
    bootstrap_interval,
    bootstrap_means,
    bootstrap_pooled,
    bootstrap_seeds,
    bootstrap_strata,
    holm,
    paired_bootstrap,
    pass_at_k,
)


def test_interval_of_binary_scores_has_the_binomial_quantiles():
    values = [1.0] * 40 + [0.0] * 60
    interval = bootstrap_interval(values, resamples=50_000)
    # Binomial(100, 0.4): P(X <= 30) = 0.0248, P(X <= 31) = 0.0398, P(X <= 49) = 0.9729, P(X <= 50) = 0.9832
    assert interval == Interval(0.4, 0.31, 0.5, 100)


def test_chunks_do_not_change_the_number_of_resamples(monkeypatch):
    import callbacks.evaluation.statistics as module

    monkeypatch.setattr(module, "CHUNK", 70)
    means = bootstrap_means([0.0, 0.5, 1.0, 2.0], resamples=1001)
    assert means.shape == (1001,) and means.min() >= 0 and means.max() <= 2
    assert means.mean() == pytest.approx(0.875, abs=0.05)


def test_coverage_of_a_95_percent_interval_is_about_95_percent():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        interval = bootstrap_interval((rng.random(200) < 0.3).astype(float), resamples=1000)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.91 <= covered / 400 <= 0.98


def test_no_values_give_nulls_and_constant_values_a_point():
    empty = bootstrap_interval([])
    assert empty.n == 0 and empty.as_json() == {"mean": None, "low": None, "high": None, "n": 0}
    assert bootstrap_interval([0.0] * 5) == Interval(0.0, 0.0, 0.0, 5)


def test_paired_difference_uses_the_pairing():
    rng = np.random.default_rng(3)
    base = (rng.random(300) < 0.5).astype(float)
    better = base.copy()
    better[np.flatnonzero(base == 0)[:15]] = 1.0  # never worse, 15 of 300 better
    result = paired_bootstrap(better, base)
    assert result.difference == pytest.approx(0.05) and result.n == 300
    # 15 winners of 300 and no loser: a resample without any winner has probability (0.95)^300 = 2e-7
    assert result.p == pytest.approx(2 / 10_001)
    assert 0 < result.low < 0.05 < result.high
    # the same scores with the pairing destroyed are no longer significant
    assert paired_bootstrap(rng.permutation(better), base).p > 0.01


# --- seeds and questions ----------------------------------------------------------------------------------------------


def test_seeds_are_drawn_and_then_questions_in_every_possible_way():
    """Two seeds, two questions: all 4 x 4 equally likely resamples, by hand."""
    a, b = np.array([[1.0, 0.0], [0.5, 0.25]]), np.array([[0.0, 0.0], [1.0, 0.0]])
    draws = list(itertools.product(range(2), repeat=2))
    both = [(a - b)[list(s)][:, list(q)].mean() for s in draws for q in draws]
    apart = [a[list(s)][:, list(q)].mean() - b[list(t)][:, list(q)].mean() for s in draws for t in draws for q in draws]
    for same_seeds, expected in ((True, both), (False, apart)):
        found = paired_bootstrap(a, b, same_seeds=same_seeds, resamples=40_000)
        assert found.difference == pytest.approx(0.1875) and found.n == 2
        assert (found.low, found.high) == pytest.approx(
            tuple(np.quantile(np.repeat(expected, 999), [0.025, 0.975])), abs=1e-9
        )
        at_most, at_least = np.mean(np.array(expected) <= 0), np.mean(np.array(expected) >= 0)
        assert found.p == pytest.approx(2 * min(at_most, at_least), abs=0.02)
    ratio = bootstrap_seeds([a, b + 1], lambda m: m[0] / m[1])
    assert ratio.mean == pytest.approx(0.4375 / 1.25) and ratio.low < ratio.mean < ratio.high


def test_seeds_that_differ_widen_the_interval_and_equal_ones_do_not():
    questions = (np.random.default_rng(2).random(400) < 0.5).astype(float)
    alone = bootstrap_interval(questions)
    equal = bootstrap_seeds([np.stack([questions] * 5)])
    assert (equal.low, equal.high) == pytest.approx((alone.low, alone.high), abs=0.01)
    differing = bootstrap_seeds([np.stack([np.clip(questions + shift, 0, 2) for shift in (0.0, 0.1, 0.2, 0.3, 0.4)])])
    assert differing.high - differing.low > 1.5 * (alone.high - alone.low)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9]) and holm([]) == []


# --- functions of means, pass@k ---------------------------------------------------------------------------------------


def test_resamples_without_a_denominator_are_left_out_and_bad_samples_refused():
    figure = bootstrap_function([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]], lambda m: m[0] / m[1])
    assert figure.mean == 2.0 and math.isfinite(figure.low) and math.isfinite(figure.high)
    assert bootstrap_function([[], []], lambda m: m[0]).n == 0
    one_each = bootstrap_pooled([("a", [1.0]), ("b", [0.0]), ("c", [1.0])])
    assert one_each == bootstrap_interval([1.0, 0.0, 1.0]) and bootstrap_pooled([]).n == 0
    rows = [("a", [1.0])] * 4 + [("b", [0.0])] * 2  # a question's turns come and go together
    pooled = bootstrap_pooled(rows)
    assert (pooled.mean, pooled.low, pooled.high, pooled.n) == (4 / 6, 0.0, 1.0, 6)
    assert pooled == dataclasses.replace(bootstrap_function([[4, 0], [4, 2]], lambda m: m[0] / m[1]), n=6)
    with pytest.raises(ValueError, match=r"measures of \[1, 2\] values"):
        bootstrap_function([[1.0], [1.0, 2.0]], lambda m: m[0])
    with pytest.raises(ValueError, match="the function is inf"), np.errstate(divide="ignore"):
        bootstrap_function([[1.0], [0.0]], lambda m: m[0] / m[1])


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_attempt():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws)), (n, c, k)


def test_pass_at_k_stays_exact_for_large_numbers_and_refuses_nonsense():
    expected = 1 - Fraction(math.comb(9_990, 100), math.comb(10_000, 100))
    assert pass_at_k(10_000, 10, 100) == pytest.approx(float(expected), rel=1e-12)
    for arguments in ((3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)):
        with pytest.raises(ValueError, match="expected 0 <= c <= n and 1 <= k <= n"):
            pass_at_k(*arguments)


def test_strata_weigh_alike_and_are_drawn_within():
    rng = np.random.default_rng(3)
    strata = [rng.normal(1.0, 0.5, size=40), rng.normal(3.0, 2.0, size=90)]
    found = bootstrap_strata(strata)
    error = np.sqrt(sum(s.var() / s.size for s in strata)) / 2
    assert found.mean == pytest.approx((strata[0].mean() + strata[1].mean()) / 2) and found.n == 130
    assert (found.high - found.low) == pytest.approx(2 * 1.96 * error, rel=0.05)
    twice = bootstrap_strata([strata[1], strata[1]])
    single = bootstrap_interval(strata[1])
    assert twice.high - twice.low == pytest.approx((single.high - single.low) / 2**0.5, rel=0.05), "drawn apart"
    with pytest.raises(ValueError, match="no stratum"):
        bootstrap_strata([])
    with pytest.raises(ValueError, match="empty"):
        bootstrap_strata([[1.0], []])
