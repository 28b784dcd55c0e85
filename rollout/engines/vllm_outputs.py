"""Replace the detokenizer and the log-probs processor that vLLM keeps for each request (vllm/v1/engine/ of 0.32).

vLLM's decode every token where there are stop strings, and make an object of every log-prob, in the one thread that
also steps.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import Any

_SETS = 32  # sets of stop strings whose tokens are kept
_BETWEEN = "\uffff"  # texts of tokens; no stop string that is searched for here has it


class StopStrings:
    """Finds the token that completes a stop string by decoding only where one can end: a token whose text begins with
    the end of a stop string, or holds one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Any = getattr(tokenizer, "_tokenizer", None)  # of the tokenizers library
        self._sorted: list[tuple[str, int]] | None = None  # (text, id) of every token, once it is needed
        self.ends = lru_cache(_SETS)(self._find_ends)

    def can_find(self, stop: tuple[str, ...]) -> bool:
        """False: vLLM has to decode, as a token's text depends on others at spaces and in the middle of a character."""
        return self._tokenizer is not None and all(s and s.isascii() and s == s.strip() for s in stop)

    def _find_ends(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the ids of the tokens that may complete one of ``stop``: the token's text begins with the end of a
        stop string (a range of the sorted texts), or contains all of it."""
        if self._sorted is None:
            ids = range(max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
            texts = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
            self._sorted = sorted(zip(texts, ids, strict=True))
            self._joined = _BETWEEN.join(text for text, _ in self._sorted)
        found: set[int] = set()
        for end in {s[i:] for s in stop for i in range(len(s))}:
            first = bisect_left(self._sorted, (end,))
            last = bisect_left(self._sorted, (end[:-1] + chr(ord(end[-1]) + 1),), first)
            found.update(token for _, token in self._sorted[first:last])
        inside = [s for s in set(stop) if s in self._joined]  # usually no token contains a whole stop string
        if inside:
            search = re.compile("|".join(map(re.escape, inside))).search
            found.update(token for text, token in self._sorted if search(text))
        return frozenset(found)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SampledTokens:
    """vLLM's ``IncrementalDetokenizer`` without text."""

    def __init__(self, stops: StopStrings, stop: tuple[str, ...]) -> None:
        self.output_token_ids: list[int] = []
        self._stops, self._stop, self._ends = stops, stop, stops.ends(stop)
        self._window = max(map(len, stop)) + 1  # tokens; each is at least a byte, the first may lose a space

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """The stop string that is complete with one of these, which is then the last that is kept."""
        for token in new_token_ids:
            self.output_token_ids.append(token)
            if token in self._ends:
                text = self._stops.decode(self.output_token_ids[-self._window :])
                found = [(text.index(s) + len(s), i) for i, s in enumerate(self._stop) if s in text]
                if found:
                    return self._stop[min(found)[1]]
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return ""


class SampledLogprobs:
    """vLLM's ``LogprobsProcessor``, and the log-probs that it gives out."""

    prompt_logprobs = prompt_token_id_logprobs = None
    cumulative_logprob = 0.0

    def __init__(self, k: int) -> None:
        self.values: list[float] = []  # of the sampled tokens
        self.top: list[dict[int, float]] = []  # the k most likely ones, a sampled one of them first
        self._k = k

    @property
    def logprobs(self) -> SampledLogprobs:
        return self

    def update_from_output(self, output: Any) -> None:
        ids, logprobs, ranks, _ = output.new_logprobs  # [n, 1 + at least k]: the sampled token's, then the best
        for row in range(len(ranks)):
            self.values.append(float(logprobs[row, 0]))
            if self._k:
                chosen, *best = ids[row, : self._k + 1].tolist()
                entry = dict(zip((chosen, *best), logprobs[row, : self._k + 1].tolist(), strict=True))
                if ranks[row] > self._k and chosen not in best:
                    del entry[chosen]
                self.top.append(entry)
