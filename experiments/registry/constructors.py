"""Reads the arguments that classes accept, from the signatures of their constructors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a class, found by following ``**kwargs`` to its bases."""

    known: dict[str, Parameter]  # the annotation is resolved; Any if it cannot be
    complete: bool  # whether the class takes no argument besides the known ones
    required: list[str]  # without default in the class's own constructor, which may pass those of its bases itself


def constructors(target: Any) -> list[Any]:
    """Return the ``__init__`` methods of a class and its bases, nearest first; for a function, the function itself."""
    if not inspect.isclass(target):
        return [target]
    return [vars(c)["__init__"] for c in inspect.getmro(target) if "__init__" in vars(c)]


@cache
def arguments_of(target: Any) -> Arguments:
    """Return the arguments that a class or function accepts by name."""
    known: dict[str, Parameter] = {}
    required: list[str] | None = None
    readable = True  # whether the annotations so far could be resolved
    for function in constructors(target):
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a builtin has no signature
            return Arguments(known, False, required or [])
        try:
            hints = get_type_hints(function, include_extras=True) if readable else {}
        except Exception:  # a TYPE_CHECKING block hides names
            hints, readable = {}, False
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        known = {p.name: p.replace(annotation=hints.get(p.name, Any)) for p in named} | known
        required = [p.name for p in named if p.default is p.empty] if required is None else required
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return Arguments(known, True, required)
    return Arguments(known, inspect.isclass(target), required or [])
