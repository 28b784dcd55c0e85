"""Shortens the start of a validation: skips libraries that it does not need, and repeated work of the parser."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

from experiments.stages.option_types import adapter

# torchmetrics imports them, where they are installed, for BERTScore, CLIPScore, audio and plots: three seconds.
OPTIONAL_FOR_METRICS = ("transformers", "scipy", "matplotlib")
COMPILER = "torch._dynamo"


def import_torchmetrics() -> None:
    """Import torchmetrics quickly, as if the packages in OPTIONAL_FOR_METRICS were not installed. Metrics that need
    them are missing then."""
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


def import_lightning() -> None:
    """Import Lightning without torch's compiler and sympy, which take a quarter of a dry run.

    Only for a process that runs no stage: Lightning would not recognise a compiled module.
    """
    if "lightning" in sys.modules or COMPILER in sys.modules:
        return
    import torch

    compiler: Any = types.ModuleType(COMPILER)
    compiler.OptimizedModule = type("OptimizedModule", (torch.nn.Module,), {})
    compiler.disable = lambda function, *_, **__: function  # a decorator in Lightning
    sys.modules[COMPILER] = compiler
    try:
        import_torchmetrics()
        import lightning.pytorch.cli  # noqa: F401
    finally:
        del sys.modules[COMPILER]


@contextmanager
def no_collection() -> Iterator[None]:
    """Context manager that switches the garbage collector off, because imports and parsing leave little garbage among
    many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def speed_up_parser() -> None:
    """Make jsonargparse faster. It imports modules under ``if TYPE_CHECKING`` (transformers, deepspeed) only for
    annotations that Python cannot resolve, and builds the validator of each range once. Idempotent."""
    from jsonargparse import _postponed_annotations, _typehints

    of_jsonargparse = _postponed_annotations.get_types
    if of_jsonargparse.__module__ == __name__:
        return

    def get_types(obj: Any, logger: Any = None, parent: Any = None) -> dict[str, Any]:
        try:
            found = get_type_hints(obj)
        except Exception:  # an annotation can raise anything
            return of_jsonargparse(obj, logger, parent)
        unresolved = any(map(_postponed_annotations.type_requires_eval, found.values()))
        return of_jsonargparse(obj, logger, parent) if unresolved else found

    _postponed_annotations.get_types = get_types
    typehints: Any = _typehints
    typehints.validate_annotated = lambda value, hint: adapter(hint).validate_python(value)
