"""Entropies from top log-probs, against values worked out by hand."""

import math

import pytest

from rollout.engines.base import Generation
from rollout.samplers.base import first_tokens_entropy, released_entropy, top_entropy

VOCABULARY = 151_665


def generation(tops, tokens=None, logprob=-5.0):
    tokens = tokens or [next(iter(top)) for top in tops]
    logprobs = tuple(top.get(token, logprob) for token, top in zip(tokens, tops, strict=True))
    return Generation(tuple(tokens), logprobs, "eos", 0, top_logprobs=tuple(tops))


def first_of_ten(p):
    return {0: math.log(p)} | {i: math.log((1 - p) / 9) for i in range(1, 10)}


@pytest.mark.parametrize(("p", "expected"), [(0.1, 3.86), (0.9, 0.91), (0.99, 0.13)])
def test_published_figures(p, expected):
    """docs/algorithms/arpo.md: a sum over 20 positions, so not within [0, 1]."""
    assert released_entropy(generation([first_of_ten(p)] * 20), 20, VOCABULARY) == pytest.approx(expected, abs=6e-3)
    more = generation([first_of_ten(p)] * 20 + [first_of_ten(0.1)] * 9)
    assert released_entropy(more, 20, VOCABULARY) == pytest.approx(expected, abs=6e-3)
    half = released_entropy(generation([first_of_ten(p)] * 10), 20, VOCABULARY)
    assert half == pytest.approx(expected / 2, abs=6e-3)  # a short segment counts for less


def test_published_entropy_counts_the_sampled_token_and_renormalises_nothing():
    top = {1: math.log(0.5), 2: math.log(0.25)}
    listed = 0.5 * math.log(2) + 0.25 * math.log(4)
    inside, outside = generation([top], [2]), generation([top], [7], math.log(0.1))
    assert released_entropy(inside, 20, 100) == pytest.approx(listed / math.log(100))
    assert released_entropy(outside, 20, 100) == pytest.approx((listed + 0.1 * math.log(10)) / math.log(100))
    assert released_entropy(Generation((), (), "length", 0, top_logprobs=()), 20, 100) == 0.0
    with pytest.raises(ValueError, match="no top log-probs"):
        released_entropy(Generation((1,), (-1.0,), "eos", 0), 20, 100)


def test_opening_entropy_is_a_mean_and_counts_what_is_left_as_one_outcome():
    certain, coin = {1: 0.0}, {1: math.log(0.5), 2: math.log(0.5)}
    assert first_tokens_entropy([certain, coin, coin], 2) == pytest.approx(math.log(2) / 2)
    assert first_tokens_entropy([coin], 20) == pytest.approx(math.log(2))
    assert top_entropy({1: math.log(0.5)}) == pytest.approx(math.log(2))
    assert first_tokens_entropy([], 20) is first_tokens_entropy(None, 20) is first_tokens_entropy([coin], 0) is None
