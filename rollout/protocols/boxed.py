r"""LaTeX's ``\boxed{}``: where models put the answers of calculations."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\boxed\s*(?P<brace>\{)|\\boxed +(?P<word>[^\s$\\{}]+)")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` (braces matched) or ``\boxed word``; None without a complete one.

    >>> last_boxed(r"so \boxed{1} and \boxed{\frac{1}{2}}"), last_boxed(r"\boxed 7 apples"), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', '7', None)
    """
    for match in reversed(list(_BOXED.finditer(text))):
        if match["word"]:
            return match["word"]
        end = _closing_brace(text, match.end())
        if end is not None:
            return text[match.end() : end].strip()
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened just before ``start`` is closed. Escaped braces count as text."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        position += 1
    return None
