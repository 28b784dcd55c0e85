"""Defines small tasks, for stages of kind task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.digests import write_digests
from common.ranges import PositiveInt


class InitialModel:
    """Task that writes a Qwen3 model with random weights and a given tokenizer as Hugging Face folder
    ``<output_dir>/model``.

    Args:
        tokenizer: Hugging Face folder of the tokenizer, which defines the vocabulary.
        hidden_size: width of the residual stream.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head; vLLM's CPU attention wants a multiple of 32.
        intermediate_size: width of the MLP; null: 3 * hidden_size.
        max_length: positions of the model.
        rope_theta: base of the rotary embedding; Qwen3's 1,000,000 suits long contexts, shorter ones learn faster
            with 10,000.
        tie_embeddings: share the input and output embeddings.
        initializer_range: standard deviation of the weights.
        seed: seed of the weights.
    """

    def __init__(
        self,
        tokenizer: str,
        hidden_size: PositiveInt = 128,
        layers: PositiveInt = 4,
        heads: PositiveInt = 4,
        kv_heads: PositiveInt = 2,
        head_dim: PositiveInt = 32,
        intermediate_size: PositiveInt | None = None,
        max_length: PositiveInt = 2048,
        rope_theta: float = 10_000.0,
        tie_embeddings: bool = True,
        initializer_range: float = 0.02,
        seed: int = 0,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"heads is {heads}; expected a multiple of kv_heads, which is {kv_heads}")
        self.tokenizer, self.seed = tokenizer, seed
        self.sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size or 3 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": max_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "tie_word_embeddings": tie_embeddings,
            "initializer_range": initializer_range,
        }

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the model folder, and return the number of parameters and of vocabulary entries."""
        import torch
        from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **self.sizes,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Qwen3ForCausalLM(config)
        model.save_pretrained(output_dir / "model")
        tokenizer.save_pretrained(output_dir / "model")
        write_digests(output_dir / "model")
        return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}
