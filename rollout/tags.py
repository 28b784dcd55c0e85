"""Readers of tagged text in linear time: a collapsed policy repeats one tag to the end of its budget."""

from __future__ import annotations


def between(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts from each ``opening`` to the next ``closing``, in order.

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
    """Return the text from the last ``opening`` that is closed to the next ``closing``; None without one.

    >>> last_between("<a>1</a> <a> <a>2</a> 3</a> <a>4", "<a>", "</a>")
    '2'
    """
    before, closed, _ = text.rpartition(closing)
    _, opened, content = before.rpartition(opening)
    return content.partition(closing)[0] if closed and opened else None
