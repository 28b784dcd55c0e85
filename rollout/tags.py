"""Readers of tagged and boxed text in linear time: a collapsed policy repeats one tag to the end of its budget."""

from __future__ import annotations

import itertools
import re

# The system prompt of ARPO's five RL files was written with an unescaped \b: a backspace stands before "oxed".
BROKEN_BOX = "\x08oxed"

_DEPTH = {"{": 1, "}": -1}
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_END_OF_MATH = re.compile(r"\$|\\\]|\\\)|\n")


def between(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts from each ``opening`` tag to the next ``closing`` tag, in order.

    Equals ``re.findall(f"{opening}(.*?){closing}", text, re.DOTALL)``, which takes quadratic time where tags are
    opened and never closed.

    >>> between("<a>1</a> <a> <a>2</a> <a>3", "<a>", "</a>")
    ['1', ' <a>2']
    """
    found: list[str] = []
    start = text.find(opening)
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        found.append(text[start + len(opening) : end])
        start = text.find(opening, end + len(closing))
    return found


def last_between(text: str, opening: str, closing: str) -> str | None:
    """Return the text of the last tag pair, from its ``opening`` to the next ``closing``; None without a pair.

    >>> last_between("<a>1</a> <a> <a>2</a> 3</a> <a>4", "<a>", "</a>")
    '2'
    """
    before, closed, _ = text.rpartition(closing)
    _, opened, content = before.rpartition(opening)
    return content.partition(closing)[0] if closed and opened else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last LaTeX ``\boxed{...}``, or None without a box or if its brace is never closed. For
    ``\boxed 8`` the content reaches to the end of the formula or line.

    >>> boxed(r"\boxed{1} or \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    _, found, rest = text.rpartition("\\boxed")
    rest = rest.lstrip(" ")
    if not found or not rest:
        return None
    if not rest.startswith("{"):
        return _END_OF_MATH.split(rest, maxsplit=1)[0].strip()
    end = closing_brace(_ESCAPED.sub("  ", rest))
    return None if end is None else rest[1:end].strip()


def closing_brace(text: str) -> int | None:
    r"""Return the index of the brace that closes the first opened brace, or None. Escaped braces count, as in released
    code.

    >>> closing_brace(r"\{a{b}} c"), closing_brace("a{b")
    (6, None)
    """
    depths = itertools.accumulate(map(_DEPTH.get, text, itertools.repeat(0)))
    return next((index for index, depth in enumerate(depths) if not depth and text[index] == "}"), None)


def unwrapped(answer: str) -> str:
    r"""Remove LaTeX's ``\text{...}`` (or a font) around a whole answer; return any other answer unchanged.

    >>> unwrapped(r"\text{Grey Harbor}"), unwrapped(r"5 \text{ cm}")
    ('Grey Harbor', '5 \\text{ cm}')
    """
    whole = _WORDS.fullmatch(answer)
    return whole[1].strip() if whole else answer


def mended(text: str) -> str:
    r"""Return a published prompt with its broken ``\boxed`` repaired: ARPO's files have a backspace in place of
    ``\b``."""
    return text.replace(BROKEN_BOX, "\\boxed")
