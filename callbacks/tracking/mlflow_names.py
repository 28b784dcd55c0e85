"""Names and texts that MLflow stores, for whatever a run logs. Pure."""

from __future__ import annotations

import hashlib
import posixpath
import re

LONGEST = 250  # characters of a metric, parameter or tag name
FORBIDDEN = re.compile(r"[^/\w.\- :]")


def mlflow_name(name: str, longest: int = LONGEST) -> str:
    """The name of a metric, parameter or tag in MLflow: ``name`` itself where MLflow takes it, else a readable one that
    ends in a hash of ``name``. Two names therefore never become one, and a name is the same in every run.

    >>> mlflow_name("test/em/问题"), mlflow_name("test/em/a+b")
    ('test/em/问题', 'test/em/a_b-e5de86d2')
    """
    if not FORBIDDEN.search(name) and not _resolves_elsewhere(name) and len(name) <= longest:
        return name
    parts = [FORBIDDEN.sub("_", part).lstrip(".") or "_" for part in name.split("/")]
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{'/'.join(parts)[: longest - len(digest) - 1]}-{digest}"


def _resolves_elsewhere(name: str) -> bool:
    """Whether the name is another one as a path, or leaves its folder: MLflow's file store makes paths of names."""
    return posixpath.normpath(name) != name or name == "." or name.startswith(("..", "/"))


def storable(value: object) -> str:
    """The value as text in UTF-8. A file name may have bytes that are not: they become escapes (``\\udcff``)."""
    return str(value).encode(errors="backslashreplace").decode()
