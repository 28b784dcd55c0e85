"""Loading the tokenizer of a model folder."""

from __future__ import annotations

from typing import Any


def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer. Raises ValueError if there is none, or it has no EOS token."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {folder!r}; expected a Hugging Face model folder: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder!r} has no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer
