"""Loads the tokenizer of a model folder, and encodes and decodes without the wrapper's overhead."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from common.errors import one_line
from common.text import whole

# Two lone surrogates replace a quoted tag: external text can contain any character, but no lone surrogate.
_HALVES = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_STAND_IN = re.compile("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")


def load_tokenizer(folder: str) -> Any:
    """Load the tokenizer of a folder. Raises ValueError if it is missing or has no EOS token."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no usable tokenizer in {folder!r}; expected a Hugging Face model folder: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {folder!r} has no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer


@contextmanager
