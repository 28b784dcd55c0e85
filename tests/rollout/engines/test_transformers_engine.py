"""The engine as users see it: `TransformersEngine` in its child process, against transformers itself."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.transformers_engine import TransformersEngine
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = TransformersEngine(str(model_dir), slots=4, max_length=256)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


def generate(engine, prompts, *sampling):
    async def main():
        settings = sampling if len(sampling) == len(prompts) else sampling * len(prompts)
        return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)))

    return asyncio.run(main())


def load(engine, reference, version):
    asyncio.run(engine.load_weights(reference.weights(), version))


def test_greedy_equals_generate_with_more_requests_than_slots(engine, reference):
    prompts = random_prompts(10)
    generations = generate(engine, prompts, SamplingParams(16, temperature=0))
    assert [list(g.token_ids) for g in generations] == [reference.greedy(p, 16) for p in prompts]
    assert {g.finish_reason for g in generations} == {"length"}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_plain_forward_pass_also_after_new_weights(engine, reference, other_reference, temperature):
    prompts = random_prompts(5, seed=2)
    sampling = SamplingParams(12, temperature=temperature, top_p=0.9, seed=11)
    before = generate(engine, prompts, sampling)
    load(engine, other_reference, 1)
    after = generate(engine, prompts, sampling)
    load(engine, reference, 2)
    back = generate(engine, prompts, sampling)
    for truth, generations, version in ((reference, before, None), (other_reference, after, 1), (reference, back, 2)):
        for prompt, generation in zip(prompts, generations, strict=True):
            assert truth.largest_gap(prompt, generation, temperature or 1.0) < LOGPROB_TOLERANCE
            assert version in (None, generation.policy_version)
    assert [g.token_ids for g in before] == [g.token_ids for g in back] != [g.token_ids for g in after]


def test_weights_that_do_not_fit_change_nothing(engine, reference, other_reference):
    prompt = random_prompts(1, seed=3)[0]
    greedy = SamplingParams(12, temperature=0)
    version = generate(engine, [prompt], greedy)[0].policy_version
    good = dict(other_reference.weights())
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = [
        (good | {name: torch.zeros(3, 3)}, "wrong shape"),
        ({n: t for n, t in good.items() if n != name}, "1 missing"),
        (good | {"model.layers.9.mlp.up_proj.weight": good[name]}, "1 unknown"),
    ]
    for weights, message in wrong:
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.load_weights(weights.items(), version + 1))
    generation = generate(engine, [prompt], greedy)[0]
    assert list(generation.token_ids) == reference.greedy(prompt, 12)
    assert generation.policy_version == version


def test_same_seed_same_tokens_alone_or_in_company(engine):
    prompt, *others = random_prompts(6, seed=4)
    alone = generate(engine, [prompt], SamplingParams(16, seed=1))[0]
    settings = [SamplingParams(16, seed=s) for s in (9, 8, 1, 7, 2, None)]
    company = generate(engine, [*others[:2], prompt, others[2], prompt, others[3]], *settings)
    assert company[2].token_ids == alone.token_ids
    assert company[4].token_ids != alone.token_ids


def test_stop_string_completed_inside_a_token_ends_there(engine, reference, model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = random_prompts(1, seed=6)[0]
    expected = reference.greedy(prompt, 40)
    pieces = [tokenizer.decode([t]) for t in expected]
    position = next(i for i, p in enumerate(pieces) if len(p) > 2 and p.isascii() and i > 2)
    stop = pieces[position][:-1]
    cut = next(i for i in range(1, 41) if stop in tokenizer.decode(expected[:i]))
    generation = generate(engine, [prompt], SamplingParams(40, temperature=0, stop=("not there", stop)))[0]
    assert list(generation.token_ids) == expected[:cut]
    assert (generation.finish_reason, generation.stop_string) == ("stop", stop)


def test_next_turn_is_cheap_and_equal(engine, reference):
    prompt = random_prompts(1, seed=7, longest=100)[0]
    greedy = SamplingParams(10, temperature=0)
    first = generate(engine, [prompt], greedy)[0]
    extended = [*prompt, *first.token_ids, 11, 12, 13]
    second = generate(engine, [extended], greedy)[0]
    assert second.cached_tokens == len(extended) - 4
    assert list(second.token_ids) == reference.greedy(extended, 10)


def test_too_long_is_a_value_error(engine):
    with pytest.raises(ValueError, match="exceed the engine's max_length 256"):
        generate(engine, [[1] * 250], SamplingParams(7))
    generate(engine, [[1] * 250], SamplingParams(6, temperature=0))


def test_impossible_settings_are_refused_at_once():
    with pytest.raises(ValueError, match="float16"):
        TransformersEngine("x", dtype="fp32")
    with pytest.raises(ValueError, match="slots >= 1"):
        TransformersEngine("x", slots=0)


def test_a_missing_model_is_named_before_anything_starts(tmp_path):
    for folder, message in ((tmp_path / "none", "none does not exist"), (tmp_path, "holds no config.json")):
        engine = TransformersEngine(str(folder))
        with pytest.raises(FileNotFoundError, match=message):
            asyncio.run(engine.start())
        assert engine.pid is None
