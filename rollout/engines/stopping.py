"""When a sequence ends: stop strings and stop tokens, checked after every token without decoding every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class StopChecker:
    """Finds out whether the newest token completes a stop string.

    Decoding is needed only after tokens that can end a stop string: those that contain it whole or begin with one of
    its suffixes. They are found once per set of stop strings; then a check is one array look-up for nearly every token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """``tokenizer``: a Hugging Face tokenizer; ``vocab_size``: of the model (may exceed the tokenizer's)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pieces: list[str] | None = None
        self._can_end: dict[tuple[str, ...], np.ndarray] = {}

    def completed(self, generated: Sequence[int], stop: tuple[str, ...]) -> str | None:
        """The stop string that the last id of ``generated`` completes (the one that ends first), or None."""
        if not stop or not self._ending_tokens(stop)[generated[-1]]:
            return None
        # A token is at least one byte, so this many tokens surely cover the string; four more in case the first
        # decoded character is a fragment of a multi-byte one.
        window = max(len(s.encode()) for s in stop) + 4
        text = self._decode(generated[-window:])
        found = [(text.find(s) + len(s), s) for s in stop if s in text]
        return min(found)[1] if found else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ending_tokens(self, stop: tuple[str, ...]) -> np.ndarray:
        """[vocab_size] bool: may this token complete one of the strings? True more often than needed, never less."""
        if stop in self._can_end:
            return self._can_end[stop]
        flags = np.zeros(self._vocab_size, dtype=bool)
        if all(s.isascii() for s in stop):
            suffixes = tuple({s[i:] for s in stop for i in range(len(s))})
            for token_id, piece in enumerate(self._vocabulary()):
                # SentencePiece tokenizers drop a leading space when one token is decoded alone: try both readings.
                flags[token_id] = any(
                    reading.startswith(suffixes) or any(s in reading for s in stop) for reading in (piece, " " + piece)
                )
        else:
            flags[:] = True  # part of a character may lie in a token that decodes to nothing readable by itself
        self._can_end[stop] = flags
        return flags

    def _vocabulary(self) -> list[str]:
        if self._pieces is None:
            known = min(self._vocab_size, len(self._tokenizer))
            self._pieces = self._tokenizer.batch_decode(
                [[i] for i in range(known)], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return self._pieces
