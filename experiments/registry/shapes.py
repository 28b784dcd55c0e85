"""Shapes of published models and data sheets of GPUs, for estimates before anything is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GB = 1e9
Precision = Literal["float32", "autocast", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The shape of a Llama-like transformer with grouped-query attention and gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool  # the embedding is the output matrix
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dimensions:
        """Return a model's shape from its Hugging Face config.json, of type qwen2, qwen3 or llama. Raises ValueError
        for another type."""
        kind, heads = config.get("model_type"), config.get("num_attention_heads")
        if kind not in ("qwen2", "qwen3", "llama") or heads is None:
            raise ValueError(f"model_type is {kind!r}; sizes are known of qwen2, qwen3 and llama")
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear module in one transformer layer, by name."""
        h, m = self.hidden, self.mlp
        attention = {"q_proj": (h, self.query), "k_proj": (h, self.key), "v_proj": (h, self.key)}
        return attention | {"o_proj": (self.query, h), "gate_proj": (h, m), "up_proj": (h, m), "down_proj": (m, h)}

    @property
    def layer_matrices(self) -> int:
        """The number of elements in the matrices of one transformer layer."""
        return sum(inputs * outputs for inputs, outputs in self.linear.values())

    @property
    def output_matrix(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        small = 2 * self.hidden + (self.query + 2 * self.key) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        ends = self.output_matrix * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.layer_matrices + small) + ends

    @property
    def body(self) -> int:
        """The number of parameters of a critic: the model without output matrix, with a head of one column."""
        return self.parameters - (0 if self.tied else self.output_matrix) + self.hidden + 1

    def kv_bytes(self, element: int = 2) -> int:
        """Return the bytes of one token's keys and values in the engine's cache."""
        return 2 * self.layers * self.key * element

    def layer_bytes(self, precision: Precision) -> float:
        """Return the bytes per token that autograd keeps of one layer for its backward pass. Counted are the inputs of
        norms and matrices, queries, keys, values, and the MLP's two halves and their product. Norms compute in float32;
        so does autocast's residual stream."""
        hidden, element = {"float32": (24, 4), "autocast": (26, 2), "bfloat16": (16, 2)}[precision]
        normed = {"float32": 8, "autocast": 6, "bfloat16": 6}[precision] if self.qk_norm else 0
        per_head = (2 * element + normed) * (self.query + self.key)
        return hidden * self.hidden + 4 * element * self.mlp + per_head + 4 * self.heads

    def residual_bytes(self, precision: Precision) -> int:
        """Return the bytes per token that gradient checkpointing keeps of one layer: the layer's input."""
        return self.hidden * (2 if precision == "bfloat16" else 4)

    def forward_flops(self, context: float) -> float:
        """Return the floating-point operations of a forward pass for one token after ``context`` tokens, output matrix
        included."""
        return 2 * (self.layers * self.layer_matrices + self.output_matrix) + 4 * self.layers * self.query * context


QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}
QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}


def _config(family: Mapping[str, Any], *sizes: int, tied: bool, **more: int) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {**family, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied, **more}


# From each model's config.json on the Hugging Face hub; the test has their published parameter counts.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _config(QWEN3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _config(QWEN3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _config(QWEN3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _config(QWEN3, 4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _config(QWEN3, 5120, 40, 40, 17408, tied=False),
    "qwen2.5-0.5b": _config(QWEN2, 896, 24, 14, 4864, tied=True),
    "qwen2.5-3b": _config(QWEN2, 2048, 36, 16, 11008, tied=True),
    "qwen2.5-7b": _config(QWEN2, 3584, 28, 28, 18944, tied=False, num_key_value_heads=4, vocab_size=152_064),
    "smollm2-135m": _config(LLAMA, 576, 30, 9, 1536, tied=True, num_key_value_heads=3, vocab_size=49_152),
    "llama-3.1-8b": _config(LLAMA, 4096, 32, 32, 14336, tied=False),
}
ALIASES = {"sod-grpo_teacher-4b": "qwen3-4b"}  # checkpoints whose name does not contain their model's


def known_model(name: str) -> dict[str, Any] | None:
    """Return the config.json of the published model whose name ``name`` contains
    (``SearchR1-ppo-qwen2.5-3b-instruct``, ``SmolLM2-135M-Instruct.Q4_1.gguf``), or None."""
    name = re.sub(r"\.[a-z0-9_]+\.gguf$", "", name.lower())
    found = [known for known in MODELS if re.search(rf"(?<![\w.]){re.escape(known)}(?![\w.])", ALIASES.get(name, name))]
    return MODELS[found[0]] if found else None


@dataclass(frozen=True, slots=True)
class GPUSpec:
    """The data sheet of a GPU: memory, bandwidth, and dense bfloat16 speed without sparsity. Or the measured figures of
    a machine without one (``experiments.registry.machine.measured_cpu``)."""

    name: str
    memory: float  # bytes
    flops: float  # per second
    bandwidth: float  # bytes per second
    overhead: float = 3 * GB  # allowance: CUDA context, NCCL's buffers, fragmentation
    efficiency: float = 0.35  # of the roofline that a run reaches: an assumption (0.23 in training 0.6B on an H200)
    is_cpu: bool = False


# From NVIDIA's data sheets (A100, H100 and H200: SXM) and its Ampere, Ada and Blackwell GeForce white papers (float32
# accumulation): GB, 1e12 operations per second, 1e12 bytes per second
GPU_SPECS = {
    key: GPUSpec(f"{name} {memory} GB", memory * GB, flops * 1e12, bandwidth * 1e12)
    for key, name, memory, flops, bandwidth in (
        ("a100-40", "A100", 40, 312, 1.555),
        ("a100", "A100", 80, 312, 2.039),
        ("h100", "H100", 80, 989, 3.35),
        ("h200", "H200", 141, 989, 4.8),
        ("l40s", "L40S", 48, 362, 0.864),
        ("l4", "L4", 24, 121, 0.3),
        ("a10", "A10", 24, 125, 0.6),
        ("3090", "RTX 3090", 24, 71, 0.936),
        ("4090", "RTX 4090", 24, 165, 1.008),
        ("5090", "RTX 5090", 32, 209, 1.792),
    )
}
