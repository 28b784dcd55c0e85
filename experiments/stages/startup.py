"""What keeps the start of a validation short: libraries that it does not need are not imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

# torchmetrics imports them, where they are installed, for BERTScore, CLIPScore, audio and plots: three seconds.
OPTIONAL_FOR_METRICS = ("transformers", "scipy", "matplotlib")


def import_torchmetrics() -> None:
    """Import what Lightning imports of torchmetrics as where OPTIONAL_FOR_METRICS are not installed; later imports of
    those are as ever. For a process that validates and ends: the metrics that need them are not there."""
    if "torchmetrics" in sys.modules:
        return
    from lightning_utilities.core import imports

    cache: Any = imports.RequirementCache
    available, met = imports.package_available, cache.__bool__
    imports.package_available = lambda name: name not in OPTIONAL_FOR_METRICS and available(name)
    cache.__bool__ = lambda self: not str(self.requirement).startswith(OPTIONAL_FOR_METRICS) and met(self)
    try:
        import torchmetrics  # noqa: F401
    finally:
        imports.package_available, cache.__bool__ = available, met


@contextmanager
def no_collection() -> Iterator[None]:
    """Imports and parsing leave little garbage, and the collector would walk all that they make again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def resolve_types_as_python() -> None:
    """Make jsonargparse import what stands under ``if TYPE_CHECKING`` (transformers, deepspeed) only for annotations
    that Python cannot resolve without. Idempotent."""
    from jsonargparse import _postponed_annotations

    of_jsonargparse = _postponed_annotations.get_types
    if of_jsonargparse.__module__ == __name__:
        return

    def get_types(obj: Any, logger: Any = None, parent: Any = None) -> dict[str, Any]:
        try:
            types = get_type_hints(obj)
        except Exception:  # whatever a name stands for can raise anything
            return of_jsonargparse(obj, logger, parent)
        unresolved = any(map(_postponed_annotations.type_requires_eval, types.values()))
        return of_jsonargparse(obj, logger, parent) if unresolved else types

    _postponed_annotations.get_types = get_types
