"""vLLM in its child process against transformers and against the transformers engine."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.transformers_backend import TransformersBackend
from rollout.engines.vllm_engine import VLLMEngine
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, Reference, random_prompts

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
GREEDY = SamplingParams(12, temperature=0)


def start(folder) -> VLLMEngine:
    engine = VLLMEngine(str(folder), max_length=256, kv_cache_bytes=32 << 20)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = start(model_dir)
    yield engine
    asyncio.run(engine.close())


def generate(engine, prompts, sampling):
    async def main():
        return await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))

    return asyncio.run(main())


@needs_vllm
@pytest.mark.slow
def test_both_engines_equal_transformers_under_greedy_decoding(engine, reference, model_dir):
    prompts = random_prompts(8, seed=20)
    here = TransformersBackend(str(model_dir), 4, 256, "float32", "cpu")
    for i, prompt in enumerate(prompts):
        here.add(i, prompt, GREEDY)
    embedded = {}
    while here.has_work:
        embedded.update(here.step())
    for i, (prompt, generation) in enumerate(zip(prompts, generate(engine, prompts, GREEDY), strict=True)):
        assert list(generation.token_ids) == reference.greedy(prompt, 12)
        assert generation.token_ids == embedded[i].token_ids
        assert generation.logprobs == pytest.approx(embedded[i].logprobs, abs=LOGPROB_TOLERANCE)
        assert (generation.finish_reason, embedded[i].finish_reason) == ("length", "length")


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_logprobs_are_tempered_and_before_truncation(engine, reference, truncation):
    prompts = random_prompts(4, seed=21)
    sampling = SamplingParams(12, temperature=0.7, seed=3, top_logprobs=4, **truncation)
    for prompt, generation in zip(prompts, generate(engine, prompts, sampling), strict=True):
        assert reference.largest_gap(prompt, generation, 0.7) < LOGPROB_TOLERANCE
        best = reference.logprobs(prompt, generation.token_ids, 0.7).topk(4)
        assert [set(entry) for entry in generation.top_logprobs] == [set(row) for row in best.indices.tolist()]
    assert [g.token_ids for g in generate(engine, prompts, sampling)] == [
        g.token_ids for g in generate(engine, prompts, sampling)
    ]


@needs_vllm
@pytest.mark.slow
def test_stop_strings_stop_tokens_and_prefixes(engine, reference, model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = random_prompts(1, seed=6, longest=100)[0] + list(range(40))
    expected = reference.greedy(prompt, 30)
    stop = next(p for p in (tokenizer.decode([t])[:-1] for t in expected[3:]) if len(p) > 1 and p.isascii())
    cut = next(i for i in range(1, 31) if stop in tokenizer.decode(expected[:i]))
    stopped = generate(engine, [prompt], SamplingParams(30, temperature=0, stop=(stop,)))[0]
    assert list(stopped.token_ids) == expected[:cut]
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    end = expected[4]
    ended = generate(engine, [prompt], SamplingParams(30, temperature=0, stop_token_ids=(end,)))[0]
    assert list(ended.token_ids) == expected[: expected.index(end) + 1]
    assert ended.finish_reason == "eos"
    assert ended.cached_tokens >= 32  # whole blocks of the same prompt


@needs_vllm
@pytest.mark.slow
def test_more_prompt_tokens_than_one_step_holds(engine, reference):
    prompts = [[i, *range(240)] for i in range(20)]  # 4,820 tokens without a common prefix, all with a seed
    for prompt, generation in zip(prompts, generate(engine, prompts, SamplingParams(4, seed=1)), strict=True):
        assert reference.largest_gap(prompt, generation) < LOGPROB_TOLERANCE


def check_new_weights(engine, old, new):
    prompts = random_prompts(3, seed=22, longest=100)
    sampled = SamplingParams(12, temperature=1.0, seed=5)
    asyncio.run(engine.load_weights(old.weights(), 1))
    before = generate(engine, prompts, GREEDY)
    with pytest.raises(ValueError, match="do not fit"):
        weights = dict(new.weights()) | {"model.norm.weight": torch.zeros(3)}
        asyncio.run(engine.load_weights(weights.items(), 2))
    assert [g.token_ids for g in generate(engine, prompts, GREEDY)] == [g.token_ids for g in before]
    asyncio.run(engine.load_weights(new.weights(), 2))
    for truth, generations in ((old, before), (new, generate(engine, prompts, GREEDY))):
        assert [list(g.token_ids) for g in generations] == [truth.greedy(p, 12) for p in prompts]
    for prompt, generation in zip(prompts, generate(engine, prompts, sampled), strict=True):
        assert new.largest_gap(prompt, generation) < LOGPROB_TOLERANCE
        assert generation.policy_version == 2


@needs_vllm
@pytest.mark.slow
def test_new_weights_tied(engine, reference, other_reference):
    check_new_weights(engine, reference, other_reference)


@needs_vllm
@pytest.mark.slow
def test_new_weights_untied(untied_dir, other_untied_dir):
    engine = start(untied_dir)
    check_new_weights(engine, Reference(untied_dir), Reference(other_untied_dir))
    asyncio.run(engine.close())


def test_without_vllm_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="make setup.*TransformersEngine"):
        VLLMEngine("anything")
