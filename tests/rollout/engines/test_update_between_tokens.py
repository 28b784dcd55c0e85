"""New weights while requests are under way: who sampled which token, and that its log-prob is that model's own."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.transformers_backend import TransformersBackend
from rollout.engines.transformers_engine import TransformersEngine
from rollout.engines.weights import WeightFiles
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts


def expected(prompt, generation, references, temperature=1.0):
    """By token, the log-prob of a plain forward pass of the model whose version the generation names."""
    chosen = torch.tensor(generation.token_ids).unsqueeze(1)
    by_version = {v: r.logprobs(prompt, generation.token_ids, temperature).gather(1, chosen)[:, 0].tolist()
                  for v, r in references.items()}  # fmt: skip
    runs = generation.version_runs or ((generation.policy_version, len(generation.token_ids)),)
    versions = [version for version, count in runs for _ in range(count)]
    return versions, [by_version[version][i] for i, version in enumerate(versions)], by_version


def check(prompts, generations, references, temperature=1.0):
    """Returns how many generations have tokens of several versions."""
    mixed = 0
    for prompt, generation in zip(prompts, generations, strict=True):
        versions, logprobs, by_version = expected(prompt, generation, references, temperature)
        assert versions == sorted(versions) and versions[-1] == generation.policy_version
        assert generation.logprobs == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)
        if generation.version_runs:
            mixed += 1
            assert generation.logprobs != pytest.approx(by_version[versions[0]], abs=1e-2), "or both models are alike"
    return mixed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_between_two_steps_of_the_transformers_backend(model_dir, reference, other_reference, temperature):
    backend = TransformersBackend(str(model_dir), 3, 128, "float32", "cpu")  # fewer slots than requests
    prompts = random_prompts(5, seed=30)
    for i, prompt in enumerate(prompts):
        backend.add(i, prompt, SamplingParams(12 + i, temperature=temperature, seed=i, top_logprobs=2))
    done, references = {}, {0: reference, 1: other_reference, 2: reference}
    for steps, version in ((4, 1), (3, 2), (None, None)):
        while backend.has_work and steps != 0:
            done.update(backend.step())
            steps = None if steps is None else steps - 1
        if version is not None:
            if version == 1:
                backend.cancel(2)
            files = WeightFiles.write(references[version].weights())
            backend.load(files)
            backend.version = version
            files.remove()
            if version == 1:
                backend.cancel(1)  # interrupted, and waiting to go on
    generations = [done[i] for i in (0, 3, 4)]
    assert done.keys() == {0, 3, 4} and [len(g.token_ids) for g in generations] == [12, 15, 16]
    assert generations[0].version_runs == ((0, 4), (1, 3), (2, 5))
    assert all(len(g.top_logprobs) == len(g.token_ids) for g in generations)
    assert check([prompts[i] for i in (0, 3, 4)], generations, references, temperature or 1.0) >= 2


def update_in_the_middle(engine, references):
    """Requests of one prompt length after another, weights pushed while they run; returns (prompts, generations)."""
    prompts = random_prompts(4, seed=31, longest=20)
    sampling = SamplingParams(200, temperature=1.0, seed=9)

    async def main():
        requests = [asyncio.ensure_future(engine.generate(prompt, sampling)) for prompt in prompts]
        await asyncio.sleep(0.05)
        for version in (1, 2, 3):
            await engine.load_weights(references[version].weights(), version, between_steps=True)
            await asyncio.sleep(0.05)
        return await asyncio.gather(*requests)

    return prompts, asyncio.run(main())


def test_in_the_engines_process(model_dir, reference, other_reference):
    engine = TransformersEngine(str(model_dir), slots=4, max_length=256)
    asyncio.run(engine.start())
    references = {0: reference, 1: other_reference, 2: reference, 3: other_reference}
    try:
        prompts, generations = update_in_the_middle(engine, references)
    finally:
        asyncio.run(engine.close())
    assert check(prompts, generations, references) >= 1, "no update came in the middle"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
def test_in_vllms_process(model_dir, reference, other_reference):
    from rollout.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(str(model_dir), max_length=256, kv_cache_bytes=32 << 20)
    asyncio.run(engine.start())
    references = {0: reference, 1: other_reference, 2: reference, 3: other_reference}
    try:
        prompts, generations = update_in_the_middle(engine, references)
    finally:
        asyncio.run(engine.close())
    assert check(prompts, generations, references) >= 1, "no update came in the middle"
