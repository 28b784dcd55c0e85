"""Derives seeds from names, equal in every process and on every machine."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**62) derived from numbers and texts, the same in every process. (``hash()`` differs
    between processes.)

    >>> derive_seed(0, "q1", 3, 0) == derive_seed(0, "q1", 3, 0) != derive_seed(0, "q1", 30, 0)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2
