"""One comparison by math-verify without a time limit; runs in the processes of `mathematics.math_equal`."""

from __future__ import annotations

import logging

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that it has no time limit: the caller has one

# Only what stands in the box: math-verify's other extractor would take some number out of a text that is none.
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)


def compare(prediction: str, gold: str) -> bool:
    """Whether math-verify takes two answers (LaTeX without delimiters) for equal; False where it can make nothing of
    one of them, or needs more memory or stack than there is."""
    try:
        said, wanted = (_parsed(text) for text in (prediction, gold))
        return bool(verify(wanted, said, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def _parsed(text: str) -> list:
    # None is "no time limit" to math-verify, whose annotation says int
    return parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
