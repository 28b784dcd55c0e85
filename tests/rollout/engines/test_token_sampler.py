from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.sampler import BatchSampler, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -30.0])
# 99.9 % quantiles of chi-square by degrees of freedom, from tables
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 4: 18.47}


def draw(params: SamplingParams, count: int) -> torch.Tensor:
    """[V] how often each token was drawn in ``count`` requests' first tokens, each with its own seed."""
    sampler = BatchSampler([params] * count, "cpu")
    numbers = [uniforms(seed, 1)[0] for seed in range(count)]
    return torch.bincount(torch.tensor(sampler.sample(LOGITS.repeat(count, 1), numbers).token_ids), minlength=6)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    kept = probabilities > 1e-6
    assert counts[~kept].sum() == 0
    expected = counts.sum() * probabilities[kept]
    return (((counts[kept] - expected) ** 2) / expected).sum().item()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    counts = draw(SamplingParams(1, temperature=temperature), 20_000)
    assert chi_square(counts, torch.softmax(LOGITS / temperature, -1)) < CHI_SQUARE_999[4]


def test_top_k_draws_from_the_renormalised_best():
    counts = draw(SamplingParams(1, top_k=3), 20_000)
    kept = torch.softmax(LOGITS, -1) * torch.tensor([1, 1, 0, 0, 1, 0])
    assert chi_square(counts, kept / kept.sum()) < CHI_SQUARE_999[2]


def test_top_p_keeps_the_token_that_crosses_it():
    probabilities = torch.softmax(LOGITS, -1)  # 0.55, 0.20, 0.07, 0.03, 0.12, 0.00
    counts = draw(SamplingParams(1, top_p=0.6), 20_000)
    kept = probabilities * torch.tensor([1, 1, 0, 0, 0, 0])
    assert chi_square(counts, kept / kept.sum()) < CHI_SQUARE_999[1]
    assert set(draw(SamplingParams(1, top_p=1e-6), 500).nonzero().flatten().tolist()) == {0}


def test_top_p_is_of_what_top_k_leaves():
    # Of the best two (0.73, 0.27 when renormalised) 0.72 is reached by the first alone.
    assert set(draw(SamplingParams(1, top_k=2, top_p=0.72), 500).nonzero().flatten().tolist()) == {0}
    assert set(draw(SamplingParams(1, top_p=0.72), 500).nonzero().flatten().tolist()) == {0, 1}


def test_logprobs_are_before_truncation_after_temperature_and_raw_when_greedy():
    params = [
        SamplingParams(1, temperature=0.5, top_k=1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, temperature=0.0, top_k=1),
    ]
    sampled = BatchSampler(params, "cpu").sample(LOGITS.repeat(3, 1), [0.99, 0.0, 0.99])
    assert sampled.token_ids == [0, 0, 0]
    tempered, raw = torch.log_softmax(LOGITS / 0.5, -1)[0].item(), torch.log_softmax(LOGITS, -1)[0].item()
    assert sampled.logprobs == pytest.approx([tempered, tempered, raw], abs=1e-6)


def test_rows_do_not_influence_each_other():
    params = [SamplingParams(1, temperature=t, top_k=k) for t, k in ((1.0, -1), (0.0, -1), (0.7, 2), (1.5, -1))]
    logits, numbers = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), [0.1, 0.5, 0.9, 0.999]
    together = BatchSampler(params, "cpu").sample(logits, numbers)
    for i, p in enumerate(params):
        alone = BatchSampler([p], "cpu").sample(logits[i : i + 1], numbers[i : i + 1])
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs == pytest.approx(together.logprobs[i : i + 1])


@pytest.mark.parametrize("number", [0.0, np.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn_at_either_end(number):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    assert BatchSampler([SamplingParams(1)], "cpu").sample(logits, [number]).token_ids[0] in (1, 2)


def test_uniform_numbers_depend_on_the_seed_only():
    assert (uniforms(5, 10) == uniforms(5, 10)).all()
    assert (uniforms(5, 10)[:4] == uniforms(5, 4)).all()
    assert (uniforms(5, 10) != uniforms(6, 10)).all()
    assert (uniforms(None, 10) != uniforms(None, 10)).all()
