"""The exception for mistakes of the user; the command line prints its message and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any


class ExperimentError(ValueError):
    """Raised for a wrong name, key, value or path from the user. The message says what was found, what was expected and
    what to do."""


def nearest(found: object, valid: Iterable[str], *, show: int = 12) -> str:
    """Return the end of an error message that suggests the most similar valid name, or lists the valid names if none is
    similar.

    >>> nearest("dgpo_tniy", ["dgpo_tiny", "sft_tiny"])
    "; did you mean 'dgpo_tiny'?"
    """
    names = sorted(set(valid))
    close = difflib.get_close_matches(str(found), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if not names:
        return ""
    rest = f", ... ({len(names)} in all)" if len(names) > show else ""
    return f"; valid: {', '.join(names[:show])}{rest}"


def require_keys(block: Any, valid: Collection[str] | None, at: str, prefix: str = "") -> None:
    """Raise ExperimentError unless ``block`` is a mapping with only ``valid`` keys (None: any keys)."""
    if not isinstance(block, dict):
        raise ExperimentError(f"{at}: expected a mapping, found {block!r}")
    for key in block:
        if valid is not None and key not in valid:
            raise ExperimentError(f"{at}: unknown key '{prefix}{key}'{nearest(str(key), valid)}")
