"""Turns names and texts into those that MLflow stores."""

from __future__ import annotations

import hashlib
import posixpath
import re

LONGEST = 250  # characters of a metric, parameter or tag name
FORBIDDEN = re.compile(r"[^/\w.\- :]")


def mlflow_name(name: str, longest: int = LONGEST) -> str:
    """Return the name of a metric, parameter or tag in MLflow: ``name`` itself if MLflow takes it.

    Any other name becomes a readable one that ends in a hash of ``name``. So two names stay different, and a name is
    the same in every run.

    >>> mlflow_name("test/em/问题"), mlflow_name("test/em/a+b")
    ('test/em/问题', 'test/em/a_b-e5de86d2')
    """
    if not FORBIDDEN.search(name) and not _resolves_elsewhere(name) and len(name) <= longest:
        return name
    parts = [FORBIDDEN.sub("_", part).lstrip(".") or "_" for part in name.split("/")]
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{'/'.join(parts)[: longest - len(digest) - 1]}-{digest}"


def _resolves_elsewhere(name: str) -> bool:
    """Whether the path of this name in MLflow's file store has another name or leaves its folder."""
    return posixpath.normpath(name) != name or name == "." or name.startswith(("..", "/"))


def storable(value: object) -> str:
    """Return the value as UTF-8 text. Other bytes, as in some file names, become escapes (``\\udcff``)."""
    return str(value).encode(errors="backslashreplace").decode()
