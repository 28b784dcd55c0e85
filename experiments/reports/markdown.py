"""Formats Markdown tables, code blocks and code spans, safe for any text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def fenced(text: str) -> str:
    """Return text as a Markdown code block, whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}text\n{text.strip(chr(10))}\n{fence}\n"


def inline(text: str, most: int = 80) -> str:
    """Return text as a Markdown code span on one line, of at most ``most`` characters."""
    flat = " ".join(text.split())
    flat = flat if len(flat) <= most else f"{flat[: most - 1]}…"
    fence = "`" * (_longest_run(flat) + 1)
    pad = " " if not flat or flat[0] == "`" or flat[-1] == "`" else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
