"""One comparison by math-verify without a time limit; runs in the processes of ``mathematics.math_equal``."""

from __future__ import annotations

import logging

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the missing time limit, which the caller has

# Read only the box: math-verify's other extractor would take a number out of any text.
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)


def compare(prediction: str, gold: str) -> bool:
    """Return whether math-verify takes two answers (LaTeX without delimiters) for equal; False if it cannot parse one
    of them, or runs out of memory or stack."""
    try:
        said, wanted = (_parsed(text) for text in (prediction, gold))
        return bool(verify(wanted, said, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def _parsed(text: str) -> list:
    # None is "no time limit" to math-verify, whose annotation says int
    return parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
