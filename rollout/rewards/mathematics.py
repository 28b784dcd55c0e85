r"""Equality of mathematical answers: math-verify (LaTeX -> SymPy), in processes with a deadline.

Rules beyond the obvious (table: tests/rollout/rewards/test_math_equality.py):

* numbers agree to six decimals (math-verify's default): 0.333333 is 1/3, 3.14159 is not pi, "05" is 5 and not 0.5;
* ``50\%`` equals 50 and 0.5; units and degrees after a number are dropped;
* the last side of an equation counts if a value is expected: ``x = 8`` is 8;
* ``1,2`` is a set without order or repetition; ``(1,2)`` is an interval or a pair;
* words are compared as words, whatever their case. math-verify would read them as products of letters: "Paris" would
  equal "Pairs".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from rollout.rewards.deadline import DeadlineExceeded, DeadlinePool, WorkerDied

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 10.0  # a usual comparison takes 0.01 to 0.5 s
MAX_CHARACTERS = 1000  # longer answers are only compared as text (the longest in MATH has about 160)
WORKERS = 2
REMEMBERED = 4096  # comparisons: the trajectories of a group repeat the same few answers
SHOWN = 60  # characters of an answer in a log line

_DELIMITED = re.compile(r"\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}\\]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
_PROCESSES = DeadlinePool("rollout.rewards.math_comparison.compare", workers=WORKERS)  # starts with the first call


def math_equal(prediction: str | None, golds: Iterable[str], timeout_s: float = DEADLINE_SECONDS) -> bool:
    """Return whether a mathematical answer equals one of the gold answers. Safe in threads.

    Args:
        prediction: LaTeX or plain text without ``\\boxed``, or None (no answer), which equals no gold answer.
        timeout_s: seconds for each comparison. A longer one counts as not equal and is logged.

    Raises:
        InfrastructureError: math-verify's process cannot be started.
    """
    if prediction is None:
        return False
    said = _bare(prediction)
    return any(_equal(said, _bare(gold), timeout_s) for gold in golds)


def _equal(said: str, wanted: str, timeout_s: float) -> bool:
    if not said or not wanted:
        return False
    if said == wanted:
        return True
    if max(len(said), len(wanted)) > MAX_CHARACTERS or not (_balanced(said) and _balanced(wanted)):
        return False
    if _NUMBER.fullmatch(said) and _NUMBER.fullmatch(wanted):
        if Fraction(said) == Fraction(wanted):
            return True
        if _INTEGER.fullmatch(said) and _INTEGER.fullmatch(wanted):
            return False
    said_words, wanted_words = _words(said), _words(wanted)
    if said_words and wanted_words:
        return said_words == wanted_words
    try:
        return _compare(said, wanted, timeout_s)
    except DeadlineExceeded:
        logger.warning(
            "math-verify took more than %g s to compare %.*r with the gold answer %.*r: counted as not equal",
            timeout_s, SHOWN, said, SHOWN, wanted,
        )  # fmt: skip
    except WorkerDied as error:
        logger.warning("%s, comparing %.*r with %.*r: counted as not equal", error, SHOWN, said, SHOWN, wanted)
    return False


@lru_cache(maxsize=REMEMBERED)  # errors are not cached: on a loaded machine a second try may be in time
def _compare(said: str, wanted: str, timeout_s: float) -> bool:
    try:
        return _PROCESSES.call(said, wanted, timeout_s=timeout_s)
    except WorkerDied:  # perhaps the system ran out of memory
        return _PROCESSES.call(said, wanted, timeout_s=timeout_s)


def _bare(text: str) -> str:
    """Return an answer without the delimiters of a formula, the full stop after it, and spare white space."""
    text = " ".join(text.split()).removesuffix(".").rstrip()
    delimited = _DELIMITED.fullmatch(text)
    return next(inner for inner in delimited.groups() if inner).strip() if delimited else text


def _balanced(text: str) -> bool:
    """Return whether an answer's unescaped braces pair up: it must not close the box that is put around it."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _words(text: str) -> str | None:
    """Return the text in lower case if it consists of words, else None. Without LaTeX's mark of text it needs at
    least three characters."""
    marked = _TEXT.fullmatch(text)
    inner = marked.group(1).strip() if marked else text
    if not _WORDS.fullmatch(inner) or (not marked and len(inner) < 3):
        return None
    return inner.casefold()
