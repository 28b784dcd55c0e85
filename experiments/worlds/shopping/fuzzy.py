"""Fuzzy matching of short texts (``token_set_ratio``), as WebShop's score measures it.

WebShop calls ``fuzz.token_set_ratio`` of thefuzz 0.19.0, which is not installed here. That release measures with the
standard library's difflib (unless python-Levenshtein is installed beside it, which WebShop's requirements do not do),
so the same number can be had without it: what follows is that measure, written anew. Later releases of thefuzz measure
with RapidFuzz, whose values differ from difflib's by some points where letters are shared out of order.
"""

from __future__ import annotations

import functools
import re
from difflib import SequenceMatcher

_NOT_A_WORD = re.compile(r"\W")
_LATIN_1 = dict.fromkeys(range(128, 256))  # what thefuzz leaves out; characters beyond stay


def words(text: str) -> frozenset[str]:
    """The different words of a text in lower case: runs of letters, digits and underscores."""
    return frozenset(_NOT_A_WORD.sub(" ", text.translate(_LATIN_1)).lower().split())


def ratio(a: str, b: str) -> int:
    """Share of equal characters in matching blocks, 0 to 100; 0 if one is empty, 100 if they are equal."""
    if a == b:
        return 100
    return round(100 * SequenceMatcher(None, a, b).ratio()) if a and b else 0


@functools.lru_cache(maxsize=65_536)
def token_set_ratio(a: str, b: str) -> int:
    """The best ``ratio`` among three texts: the words in common, and these followed by the rest of ``a``, or of ``b``.

    So it is 100 as soon as the words of one text are all in the other, and 0 when one has no word.

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
