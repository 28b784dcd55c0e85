"""The continuous batching itself, run in this process: every architecture and schedule must equal transformers."""

from __future__ import annotations

import random
import re

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.transformers_backend import TransformersBackend
from rollout.engines.weights import WeightFiles
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, Reference, random_prompts

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def backend(folder, slots=4, max_length=256) -> TransformersBackend:
    return TransformersBackend(str(folder), slots, max_length, "float32", "cpu")


def run(engine, prompts, sampling=GREEDY):
    settings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    for i, (prompt, s) in enumerate(zip(prompts, settings, strict=True)):
        engine.add(i, prompt, s)
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return [done[i] for i in range(len(prompts))]


def small_model(tmp_path, model_dir, architecture):
    """An untied model of another family, with the shared tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
    from transformers import AutoModelForCausalLM as Auto

    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {"initializer_range": 0.2, "tie_word_embeddings": False}
    config = {
        "llama": lambda: LlamaConfig(**sizes),
        "llama_multi_head": lambda: LlamaConfig(**sizes | {"num_key_value_heads": 4}),
        "qwen2": lambda: Qwen2Config(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, head_dim=16),
        "mistral_sliding_window": lambda: MistralConfig(**sizes, sliding_window=8),
        "qwen2_mixed_windows": lambda: Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
    }[architecture]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Auto.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "architecture", ["llama", "llama_multi_head", "qwen2", "qwen3", "mistral_sliding_window", "qwen2_mixed_windows"]
)
def test_greedy_equals_generate_for_every_architecture(tmp_path, model_dir, architecture):
    folder = small_model(tmp_path, model_dir, architecture)
    truth = Reference(folder)
    prompts = random_prompts(7, longest=40)
    for prompt, generation in zip(prompts, run(backend(folder), prompts), strict=True):
        assert list(generation.token_ids) == truth.greedy(prompt, 12)
        assert truth.largest_gap(prompt, generation) < LOGPROB_TOLERANCE


def test_many_turns_over_few_slots_equal_plain_forward_passes(model_dir, reference):
    """Random arrivals, lengths, shared prompts, forks and evictions: rows are swapped, copied and continued, and no
    sequence may ever read another one's keys. Sampled, so that every sequence is different."""
    draw = random.Random(1)
    engine = backend(model_dir, slots=5)
    roots = random_prompts(4, seed=5, longest=40)
    sequences = {i: list(roots[i % 4]) for i in range(24)}
    remaining, prompts, checked, spared = dict.fromkeys(sequences, 3), {}, 0, 0
    waiting = list(sequences)
    while waiting or engine.has_work:
        for i in draw.sample(waiting, min(len(waiting), draw.randrange(5))):
            waiting.remove(i)
            prompts[i] = list(sequences[i])
            sampling = SamplingParams(max_new_tokens=draw.randrange(1, 14), temperature=1.0, seed=100 * i)
            engine.add(i, prompts[i], sampling)
        for i, generation in engine.step() if engine.has_work else ():
            assert reference.largest_gap(prompts[i], generation) < LOGPROB_TOLERANCE
            checked, spared = checked + 1, spared + generation.cached_tokens
            sequences[i] += [*generation.token_ids, *(draw.randrange(400) for _ in range(draw.randrange(1, 9)))]
            if draw.random() < 0.2:  # a fork: another sequence leaves from this one's prefix
                other = draw.choice(waiting) if waiting else i
                sequences[other] = sequences[i][: draw.randrange(2, len(sequences[i]))]
            remaining[i] -= 1
            if remaining[i]:
                waiting.append(i)
    assert checked == 72
    assert spared > 0


def test_next_turn_computes_only_what_is_new(model_dir):
    prompt = random_prompts(1, longest=50)[0] + [1, 2, 3]
    engine, fresh = backend(model_dir), backend(model_dir)
    first = run(engine, [prompt])[0]
    assert first.cached_tokens == 0
    second_prompt = [*prompt, *first.token_ids, 9, 8, 7, 6]
    second = run(engine, [second_prompt])[0]
    without = run(fresh, [second_prompt])[0]
    assert second.cached_tokens == len(second_prompt) - 5  # the observation and the last sampled token are new
    assert without.cached_tokens == 0
    assert second.token_ids == without.token_ids
    assert second.logprobs == pytest.approx(without.logprobs, abs=LOGPROB_TOLERANCE)


def test_samples_of_one_prompt_compute_it_once(model_dir):
    prompt = list(range(50, 90))
    settings = [SamplingParams(max_new_tokens=6, seed=i) for i in range(6)]
    together = run(backend(model_dir, slots=8), [prompt] * 6, settings)
    assert sorted(g.cached_tokens for g in together) == [0] + [len(prompt) - 1] * 5
    alone = [run(backend(model_dir), [prompt], [s])[0] for s in settings]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_without_reuse_everything_is_computed_and_the_same_is_sampled(model_dir):
    prompt = list(range(50, 90))
    settings = [SamplingParams(max_new_tokens=6, seed=i) for i in range(5)]
    shared, whole = (
        run(TransformersBackend(str(model_dir), 3, 256, "float32", "cpu", prefix_reuse), [prompt] * 5, settings)
        for prefix_reuse in (True, False)
    )
    assert sum(g.cached_tokens for g in shared) > 0 and [g.cached_tokens for g in whole] == [0] * 5
    assert [g.token_ids for g in whole] == [g.token_ids for g in shared]


def test_least_recently_used_prefix_is_the_one_that_goes(model_dir):
    engine = backend(model_dir, slots=2)
    a, b, c = list(range(0, 20)), list(range(100, 120)), list(range(200, 220))
    run(engine, [a])
    run(engine, [b])
    run(engine, [c])  # evicts a
    assert run(engine, [b])[0].cached_tokens == 19
    assert run(engine, [c])[0].cached_tokens == 19
    assert run(engine, [a])[0].cached_tokens == 0


def test_more_requests_than_slots_are_served_in_order(model_dir):
    engine = backend(model_dir, slots=3)
    for i, prompt in enumerate(random_prompts(9)):
        engine.add(i, prompt, SamplingParams(max_new_tokens=5, temperature=0))
    order = []
    while engine.has_work:
        order.append(sorted(i for i, _ in engine.step()))
    assert [batch for batch in order if batch] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_long_request_does_not_hold_up_short_ones(model_dir):
    engine = backend(model_dir, slots=2)
    prompts = random_prompts(4)
    for i, count in enumerate((30, 3, 3, 3)):
        engine.add(i, prompts[i], SamplingParams(max_new_tokens=count, temperature=0))
    finished = []
    while engine.has_work:
        finished += [i for i, _ in engine.step()]
    assert finished == [1, 2, 3, 0]


def test_cancelled_requests_free_their_place(model_dir, reference):
    engine = backend(model_dir, slots=2)
    prompts = random_prompts(4)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, GREEDY)
    done = dict(engine.step())
    engine.cancel(0)  # running
    engine.cancel(3)  # queued
    while engine.has_work:
        done.update(engine.step())
    assert sorted(done) == [1, 2]
    assert all(list(done[i].token_ids) == reference.greedy(prompts[i], 12) for i in done)


def test_stop_token_is_kept_and_named(model_dir, reference):
    prompt = random_prompts(1)[0]
    expected = reference.greedy(prompt, 12)
    end = expected[5]
    cut = expected.index(end) + 1
    generation = run(backend(model_dir), [prompt], SamplingParams(12, temperature=0, stop_token_ids=(end,)))[0]
    assert (list(generation.token_ids), generation.finish_reason) == (expected[:cut], "eos")
    assert len(generation.logprobs) == cut


def test_top_logprobs_are_the_most_likely_tokens(model_dir, reference):
    prompt = random_prompts(1)[0]
    sampling = SamplingParams(8, temperature=0.7, seed=1, top_logprobs=5)
    with_top, without = run(backend(model_dir), [prompt] * 2, [sampling, SamplingParams(8, temperature=0.7, seed=1)])
    assert without.top_logprobs is None
    assert with_top.token_ids == without.token_ids
    best = reference.logprobs(prompt, with_top.token_ids, 0.7).topk(5)
    for position, entry in enumerate(with_top.top_logprobs):
        assert list(entry) == best.indices[position].tolist()
        assert list(entry.values()) == pytest.approx(best.values[position].tolist(), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("with_head", [True, False])
def test_new_weights_tied(model_dir, other_reference, with_head):
    engine = backend(model_dir)
    prompt = random_prompts(1, longest=40)[0]
    before = run(engine, [prompt])[0]
    weights = dict(other_reference.weights())
    assert "lm_head.weight" not in weights
    if with_head:  # as a state_dict() gives it
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    files = WeightFiles.write(weights.items())
    engine.load(files)
    files.remove()
    after = run(engine, [prompt])[0]
    assert after.cached_tokens == 0  # nothing of the old weights' keys is reused
    assert list(after.token_ids) == other_reference.greedy(prompt, 12)
    assert after.token_ids != before.token_ids


def test_new_weights_untied(untied_dir, other_untied_dir):
    engine, truth = backend(untied_dir), Reference(other_untied_dir)
    prompt = random_prompts(1)[0]
    run(engine, [prompt])
    weights = dict(truth.weights())
    headless = WeightFiles.write((n, t) for n, t in weights.items() if n != "lm_head.weight")
    with pytest.raises(ValueError, match=re.escape("1 missing (lm_head.weight)")):
        engine.load(headless)
    files = WeightFiles.write(weights.items())
    engine.load(files)
    for written in (files, headless):
        written.remove()
    generation = run(engine, [prompt], SamplingParams(12, temperature=1.0, seed=0))[0]
    assert truth.largest_gap(prompt, generation) < LOGPROB_TOLERANCE
    assert list(run(engine, [prompt])[0].token_ids) == truth.greedy(prompt, 12)


def test_weights_that_are_not_numbers_are_reported(model_dir, reference):
    engine = backend(model_dir)
    files = WeightFiles.write((n, t * float("nan")) for n, t in reference.weights())
    engine.load(files)
    files.remove()
    engine.add(0, [1, 2, 3], GREEDY)
    with pytest.raises(FloatingPointError, match="diverged"):
        engine.step()


def test_max_length_beyond_the_models_positions_is_refused(model_dir):
    with pytest.raises(ValueError, match="beyond the 1024 positions"):
        backend(model_dir, max_length=2048)
