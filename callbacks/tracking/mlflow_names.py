"""Turns names and texts into those that MLflow stores."""

from __future__ import annotations

import hashlib
import posixpath
import re

LONGEST = 250  # characters of a metric, parameter or tag name
FORBIDDEN = re.compile(r"[^/\w.\- :]")


def mlflow_name(name: str, longest: int = LONGEST) -> str:
    """Return the name under which MLflow stores a metric, parameter or tag: ``name`` itself if MLflow accepts it.

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
    """Return whether MLflow's file store would write this name to another path, or outside of its folder."""
    return posixpath.normpath(name) != name or name == "." or name.startswith(("..", "/"))


def storable(value: object) -> str:
    """Return the value as text that UTF-8 can encode. Other bytes, as in some file names, become escapes
    (``\\udcff``)."""
    return str(value).encode(errors="backslashreplace").decode()
