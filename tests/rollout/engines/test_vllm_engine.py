"""The engine of every experiment, vLLM in its child process, against transformers' own forward pass."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import types

import pytest
import tokenizers
import torch

from experiments.registry.machine import onednn_isa
from rollout.engines.base import SamplingParams
from rollout.engines.vllm_backend import SampledTokens, StopStrings
from rollout.engines.vllm_engine import VLLMEngine
from rollout.trajectory import PermanentFailure
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, Reference, generate, random_prompts
from tests.rollout.engines.pushing import push_weights

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
GREEDY = SamplingParams(12, temperature=0)
STOPS = [("</search>", "</answer>"), (">",), ("er",), ("</tool_call>", "a b")]


def start(folder) -> VLLMEngine:
    engine = VLLMEngine(str(folder), max_length=256, kv_cache_bytes=32 << 20)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = start(model_dir)
    yield engine
    asyncio.run(engine.close())


@needs_vllm
def test_greedy_tokens_are_those_of_transformers(engine, reference):
    prompts = random_prompts(8, seed=20)
    for prompt, generation in zip(prompts, generate(engine, prompts, GREEDY), strict=True):
        assert list(generation.token_ids) == reference.greedy(prompt, 12)
        assert generation.finish_reason == "length" and reference.largest_gap(prompt, generation) < LOGPROB_TOLERANCE


@needs_vllm
def test_a_request_gives_the_same_bits_in_any_company(engine, reference):
    """Exact resume and "same seed, same trajectories" rest on it: neither arrival, nor what else is in the batch, nor
    cached prefixes change a token or the last bit of a log-prob."""
    prompts = [p for p in random_prompts(12, seed=23, longest=120) for _ in range(2)]
    settings = [SamplingParams(40, seed=i) for i in range(len(prompts))]

    async def turns(order, at_once):
        """Two turns of each prompt, so many of them at once."""
        free, said = asyncio.Semaphore(at_once), {}

        async def both(i):
            async with free:
                first = await engine.generate(prompts[i], settings[i])
                second = await engine.generate([*prompts[i], *first.token_ids, 7, 8], settings[i])
                said[i] = [(g.token_ids, g.logprobs) for g in (first, second)]

        await asyncio.gather(*map(both, order))
        return said

    together = asyncio.run(turns(range(len(prompts)), 64))
    assert asyncio.run(turns(reversed(range(len(prompts))), 3)) == together
    asyncio.run(push_weights(engine, reference.weights(), 1))  # as after a resume: nothing is cached
    assert asyncio.run(turns(range(len(prompts)), 7)) == together


@needs_vllm
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
def test_a_repetition_penalty_reaches_vllm(engine):
    prompt = random_prompts(1, seed=8)[0]
    free, penalised = (
        generate(engine, [prompt], SamplingParams(24, temperature=0, repetition_penalty=penalty))[0].token_ids
        for penalty in (1.0, 1e6)
    )
    assert len({*prompt, *penalised}) == len({*prompt}) + 24, "no token twice, nor one of the prompt"
    assert len({*prompt, *free}) < len({*prompt}) + 24


@needs_vllm
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


def test_stops_are_found_where_decoding_every_prefix_finds_them(model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    stops, draw = StopStrings(tokenizer), random.Random(0)
    assert not stops.can_find((" x",)) and not stops.can_find(("é",))
    text = "Who went over? <search> the harbour é </search> or </answer> a b > 雪 </tool_call>\n"
    pieces = [tokenizer.encode(text[i:], add_special_tokens=False) for i in range(len(text))]
    ended = 0
    for i in range(400):
        stop = STOPS[i % len(STOPS)]
        ids = [token for _ in range(4) for token in draw.choice(pieces)[: draw.randrange(1, 6)]]
        ids += [draw.randrange(len(tokenizer)) for _ in range(4)]
        draw.shuffle(ids)
        ids += draw.choice(pieces)
        assert stops.can_find(stop)
        found = SampledTokens(stops, stop)
        said = found.update(ids[:2], False) or found.update(ids[2:], False)
        expected = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)), None)
        assert found.output_token_ids == ids[:expected]
        assert (said is None) == (expected is None) and (said is None or said in stop)
        ended += said is not None
    assert 100 < ended < 400


def test_tokens_that_may_complete_a_stop_string_are_those_of_the_definition():
    """The definition, token by token, costs 40 s for 100 stop strings and a vocabulary of 151,643."""

    def may_complete(text, stop):
        return any(s in text or any(s.endswith(text[:i]) for i in range(1, len(text) + 1)) for s in stop)

    draw = random.Random(0)
    word = lambda letters, longest: "".join(draw.choice(letters) for _ in range(draw.randrange(1, longest)))  # noqa: E731
    texts = sorted({word("ab</>. Ġéx", 9) for _ in range(1500)} | {"</search>", "x</search>\n", "\uffff<", "~", "\x7f"})
    vocabulary = {text: i for i, text in enumerate(draw.sample(texts, len(texts)))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "~"))
    stops, seen = StopStrings(types.SimpleNamespace(_tokenizer=tokenizer)), 0
    sets = [("</search>", "</answer>"), (">",), ("~",), ("\x7f",), ("a.b", "a.b", "a|b"), ("x" * 256,), tuple("ab</>.")]
    for stop in [*sets, *(tuple(word("ab</>.x", 6) for _ in range(draw.randrange(1, 9))) for _ in range(30))]:
        assert stops.ends(stop) == {i for text, i in vocabulary.items() if may_complete(text, stop)}
        seen += len(stops.ends(stop))
    assert seen > 3_000 and stops.ends.cache_info().currsize == 32, "only the latest sets are kept"


@needs_vllm
def test_more_prompt_tokens_than_one_step_holds(engine, reference):
    prompts = [[i, *range(240)] for i in range(20)]  # 4,820 tokens without a common prefix, all with a seed
    for prompt, generation in zip(prompts, generate(engine, prompts, SamplingParams(4, seed=1)), strict=True):
        assert reference.largest_gap(prompt, generation) < LOGPROB_TOLERANCE


def check_new_weights(engine, old, new):
    prompts = random_prompts(3, seed=22, longest=100)
    sampled = SamplingParams(12, temperature=1.0, seed=5)
    asyncio.run(push_weights(engine, old.weights(), 1))
    before = generate(engine, prompts, GREEDY)
    with pytest.raises(ValueError, match="do not fit"):
        weights = dict(new.weights()) | {"model.norm.weight": torch.zeros(3)}
        asyncio.run(push_weights(engine, weights.items(), 2))
    assert [g.token_ids for g in generate(engine, prompts, GREEDY)] == [g.token_ids for g in before]
    asyncio.run(push_weights(engine, new.weights(), 2))
    for truth, generations in ((old, before), (new, generate(engine, prompts, GREEDY))):
        assert [list(g.token_ids) for g in generations] == [truth.greedy(p, 12) for p in prompts]
    for prompt, generation in zip(prompts, generate(engine, prompts, sampled), strict=True):
        assert new.largest_gap(prompt, generation) < LOGPROB_TOLERANCE
        assert generation.policy_version == 2


@needs_vllm
def test_new_weights_tied(engine, reference, other_reference):
    check_new_weights(engine, reference, other_reference)


@needs_vllm
@pytest.mark.slow
def test_weights_and_logits_that_are_not_finite(other_dir):
    """The ones are refused, the others fail their request; the engine goes on."""
    engine, truth = start(other_dir), Reference(other_dir)

    async def main():
        broken = {n: t * float("nan") for n, t in truth.weights()}
        with pytest.raises(ValueError, match="the weights are not finite: .* numbers of model"):
            await push_weights(engine, broken.items(), 5)
        assert (await engine.generate([1, 2], GREEDY)).policy_version == 0
        await push_weights(engine, {n: t * 1e18 for n, t in truth.weights()}.items(), 6)
        with pytest.raises(PermanentFailure, match="logits are not finite .weights of version 6."):
            await engine.generate([1, 2], GREEDY)
        await push_weights(engine, truth.weights(), 7)
        assert list((await engine.generate([1, 2], GREEDY)).token_ids) == truth.greedy([1, 2], 12)
        await engine.close()

    asyncio.run(main())


@needs_vllm
@pytest.mark.slow
def test_new_weights_untied(untied_dir, other_untied_dir):
    engine = start(untied_dir)
    check_new_weights(engine, Reference(untied_dir), Reference(other_untied_dir))
    asyncio.run(engine.close())


@needs_vllm
@pytest.mark.slow
def test_the_second_model_runner_reports_logprobs_before_truncation(monkeypatch):
    """Its sampler as it is, but for the kernel that draws, which needs Triton."""
    from vllm.v1.worker.gpu.sample import sampler as module

    from rollout.engines.vllm_backend import WorkerExtension

    monkeypatch.setattr(module, "gumbel_sample", lambda logits, *arguments, **options: logits.argmax(-1))
    sampler = object.__new__(module.Sampler)
    sampler.use_fp64_gumbel = False
    none = types.SimpleNamespace(gpu=None)
    sampler.sampling_states = types.SimpleNamespace(temperature=none, seeds=none)
    worker = WorkerExtension()
    worker.model_runner = types.SimpleNamespace(sampler=sampler)
    assert worker.report_untruncated_logprobs()
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    for k, p in ((torch.full((3,), 2), None), (None, torch.full((3,), 0.5)), (None, None)):
        drawn, returned = sampler._sample_random(logits.clone(), None, None, None, k, p, False)
        assert torch.equal(returned, logits) and torch.equal(drawn, logits.argmax(-1))
    worker.model_runner = types.SimpleNamespace(sampler=None)
    assert not worker.report_untruncated_logprobs()


def test_without_vllm_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="make setup"):
        VLLMEngine("anything")


@needs_vllm
@pytest.mark.slow
def test_asleep_and_awake_again_the_engine_is_the_same(model_dir, other_dir):
    """vLLM's own order of calls; that memory is freed shows on CUDA alone."""
    prompts = random_prompts(4, seed=31)

    async def run():
        engine = VLLMEngine(str(model_dir), max_length=256, kv_cache_bytes=32 << 20)
        engine.allow_sleep()
        await engine.start()
        try:
            before = [await engine.generate(prompt, GREEDY) for prompt in prompts]
            await engine.sleep()
            with pytest.raises(RuntimeError, match="generate was called while the engine is asleep"):
                await engine.generate(prompts[0], GREEDY)
            await engine.wake_up()
            again = [await engine.generate(prompt, GREEDY) for prompt in prompts]
            await engine.sleep()
            other = Reference(other_dir)
            await push_weights(engine, other.weights(), 1)
            return before, again, [await engine.generate(prompt, GREEDY) for prompt in prompts], other
        finally:
            await engine.close()

    before, again, pushed, other = asyncio.run(run())
    assert again == before and all(generation.cached_tokens == 0 for generation in again)
    for prompt, generation in zip(prompts, pushed, strict=True):
        assert generation.policy_version == 1 and list(generation.token_ids) == other.greedy(prompt, 12)


@needs_vllm
@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="bfloat16 needs AVX512_BF16")
@pytest.mark.parametrize("isa", ["AVX512_CORE_BF16", "DEFAULT"])
def test_bfloat16_with_and_without_amx(model_dir, monkeypatch, isa):
    """vLLM's attention died by SIGILL without it, where the processor has AMX and oneDNN may not use it."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    if isa == "DEFAULT" and onednn_isa() != isa:
        pytest.skip("this processor does not run AMX")
    engine = VLLMEngine(str(model_dir), max_length=256, dtype="bfloat16", restarts=0)

    async def main():
        await engine.start()
        prompts = random_prompts(6, seed=3, longest=150)
        found = await asyncio.gather(*(engine.generate(p, SamplingParams(40, seed=1)) for p in prompts))
        await engine.close()
        return found

    assert all(len(g.token_ids) == 40 for g in asyncio.run(main()))
