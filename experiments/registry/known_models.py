"""Dimensions of the published models that experiments name, for what is asked before they are downloaded.

From the config.json of each on the Hugging Face hub; their parameter counts, as published, are in the test.
"""

from __future__ import annotations

import re
from typing import Any

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151_936, "num_key_value_heads": 8}
QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936}
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _config(family: dict[str, Any], *sizes: int, tied: bool, **more: int) -> dict[str, Any]:
    return family | dict(zip(NAMES, sizes, strict=True)) | {"tie_word_embeddings": tied} | more


MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _config(QWEN3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _config(QWEN3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _config(QWEN3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _config(QWEN3, 4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _config(QWEN3, 5120, 40, 40, 17408, tied=False),
    "qwen2.5-0.5b": _config(QWEN2, 896, 24, 14, 4864, tied=True, num_key_value_heads=2),
    "qwen2.5-3b": _config(QWEN2, 2048, 36, 16, 11008, tied=True, num_key_value_heads=2),
    "qwen2.5-7b": _config(QWEN2, 3584, 28, 28, 18944, tied=False, num_key_value_heads=4, vocab_size=152_064),
    "llama-3.1-8b": _config(
        {"model_type": "llama"}, 4096, 32, 32, 14336, tied=False, num_key_value_heads=8, vocab_size=128_256
    ),
}

ALIASES = {"sod-grpo_teacher-4b": "qwen3-4b"}  # folders of published checkpoints that do not say what they are of


def known_model(name: str) -> dict[str, Any] | None:
    """The config.json of the model whose name a folder's contains (``SearchR1-ppo-qwen2.5-3b-instruct``)."""
    if name.lower() in ALIASES:
        return MODELS[ALIASES[name.lower()]]
    found = [known for known in MODELS if re.search(rf"(?<![\w.]){re.escape(known)}(?![\w.])", name.lower())]
    return MODELS[found[0]] if found else None
