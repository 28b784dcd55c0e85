"""Fuzzy matching of short texts (``token_set_ratio``), as in WebShop's score.

WebShop calls ``fuzz.token_set_ratio`` of thefuzz 0.19.0, which is not installed here. Without python-Levenshtein, which
WebShop does not require, that release uses the standard library's difflib. This module computes the same number. Later
releases use RapidFuzz, whose values differ by some points if texts share letters in another order.
"""

from __future__ import annotations

import functools
import re
from difflib import SequenceMatcher

_NOT_A_WORD = re.compile(r"\W")
_LATIN_1 = dict.fromkeys(range(128, 256))  # the characters thefuzz leaves out; characters beyond these stay


def words(text: str) -> frozenset[str]:
    """Return the distinct words of a text in lower case: runs of letters, digits and underscores."""
    return frozenset(_NOT_A_WORD.sub(" ", text.translate(_LATIN_1)).lower().split())


def ratio(a: str, b: str) -> int:
    """Return the similarity of two texts, 0 to 100: the share of characters in matching blocks (difflib). Equal texts
    have 100, an empty text 0.
    """
    if a == b:
        return 100
    return round(100 * SequenceMatcher(None, a, b).ratio()) if a and b else 0


@functools.lru_cache(maxsize=65_536)
def token_set_ratio(a: str, b: str) -> int:
    """Return the similarity of two texts, 0 to 100, whatever the order of their words. It is the best ``ratio`` among
    three texts: the common words alone, with the other words of ``a``, and with those of ``b``.

    It is 100 if one text contains all words of the other, and 0 if one has no word.

    >>> token_set_ratio("natural ingredients", "ingredients (all natural)"), token_set_ratio("grey", "gray")
    (100, 75)
    """
    first, second = words(a), words(b)
    if not first or not second:
        return 0
    common = " ".join(sorted(first & second))
    with_first = f"{common} {' '.join(sorted(first - second))}".strip()
    with_second = f"{common} {' '.join(sorted(second - first))}".strip()
    return max(ratio(common, with_first), ratio(common, with_second), ratio(with_first, with_second))
