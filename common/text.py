"""Text utilities: lone surrogates and plain JSON.

JSON can write lone surrogates (``"\\ud83d"``), but UTF-8 and tokenizers refuse them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, TypeVar

Value = TypeVar("Value")
_HALF = re.compile("[\ud800-\udfff]")


def whole(value: Value) -> Value:
    """Replace unpaired surrogates by U+FFFD, in a text or in all texts inside lists, tuples, dicts and data classes.
    Two surrogates that form a pair become their character.

    >>> whole({"a": ["\\ud83d!", "\\ud83d\\ude00"]}) == {"a": ["\\ufffd!", "\\U0001f600"]}
    True
    """
    changed: Any = value
    if isinstance(value, str):
        if not value.isascii() and _HALF.search(value):
            changed = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, dict):
        changed = {whole(name): whole(inner) for name, inner in value.items()}
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        changed = type(value)(map(whole, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = dataclasses.replace(value, **{name: whole(getattr(value, name)) for name in names})
    return changed


def plain_json(facts: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a dict converted to plain JSON types.

    Tuples and arrays become lists, numbers of numpy and torch become Python's, and texts pass through ``whole``. Raises
    TypeError or ValueError, with the name ``what``, for values that JSON lacks, such as NaN and infinity.
    """
    if not isinstance(facts, dict):
        raise TypeError(f"{what} is {type(facts).__name__}; expected a dict")
    return _plain(whole(facts), what)


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{what} has the key {wrong[0]!r}; expected texts as keys")
        return {key: _plain(inner, f"{what}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{what}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} is {value}; expected a finite number")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if callable(listed := getattr(value, "tolist", None)):
        return _plain(listed(), what)
    raise TypeError(f"{what} is {type(value).__name__}; expected plain JSON: texts, numbers, lists, dicts")


class HalfPair(ValueError):
    """Raised if a text contains an unpaired surrogate. The message quotes it."""


def strict_json(text: str | bytes) -> Any:
    """Parse JSON, and raise HalfPair if a text in it contains an unpaired surrogate."""
    if isinstance(text, bytes):
        text = text.decode()  # json itself accepts lone surrogates in bytes
    value = json.loads(text)
    if "\\u" in text:
        refuse_halves(value)
    return value


def refuse_halves(value: Any) -> None:
    """Raise HalfPair if any text in the plain JSON ``value`` contains an unpaired surrogate."""
    if found := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise HalfPair(f"half of a surrogate pair, {ascii(found[0])[1:-1]}; expected whole characters")
