"""The text of a web page, in time proportional to its length whatever is in it.

Pages are written by strangers, so html.parser will not do: Python 3.11's takes a minute for 60 kB of "<a " and raises
AssertionError at "<![".
"""

from __future__ import annotations

import html
import re

_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9:-]{0,30})")
_TAG_END = re.compile(r"""(?:[^>"']++|"[^"]*+"|'[^']*+')*+>""")  # possessive: nothing to go back to
_NOT_READ = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "select", "textarea"})
_INLINE = frozenset({
    "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img",
    "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var",
    "wbr",
})  # fmt: skip
_CELL = frozenset({"td", "th"})
_LONG_REFERENCE = re.compile(r"&#[xX]?[0-9a-fA-F]{9,}")  # no character; int() refuses the longest


def html_to_text(source: str) -> str:
    """What a reader sees: one line per block, title first, cells of a table apart, single spaces, no empty lines.

    >>> html_to_text("<title>T</title><script>x()</script><p>One <b>bold</b><br>two &amp; three")
    'T\\nOne bold\\ntwo & three'
    """
    pieces: list[str] = []
    never_closed: set[str] = set()  # looked for once and not found: not found further on either
    at, end = 0, len(source)
    while at < end:
        opening = source.find("<", at)
        if opening < 0:
            pieces.append(source[at:])
            break
        pieces.append(source[at:opening])
        if source.startswith("<!--", opening):
            at = _after(source, "-->", opening + 4)
            continue
        tag = _TAG.match(source, opening)
        if tag is None:
            if source.startswith(("<!", "<?", "</"), opening):
                at = _after(source, ">", opening + 2)
            else:  # a "less than"
                pieces.append("<")
                at = opening + 1
            continue
        closing, name = tag[1], tag[2].lower()
        tag_end = _TAG_END.match(source, tag.end())
        at = tag_end.end() if tag_end else _after(source, ">", tag.end())
        if name not in _INLINE and name not in _NOT_READ:
            pieces.append(" " if name in _CELL else "\n")
        if not closing and name in _NOT_READ and name not in never_closed:
            found = re.compile(f"</{name}", re.IGNORECASE).search(source, at)
            if found is not None:
                at = found.start()
            elif name in ("script", "style"):
                break  # as browsers do: all the rest belongs to it
            else:
                never_closed.add(name)
    text = html.unescape(_LONG_REFERENCE.sub("\ufffd", "".join(pieces)))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _after(source: str, mark: str, at: int) -> int:
    found = source.find(mark, at)
    return len(source) if found < 0 else found + len(mark)
