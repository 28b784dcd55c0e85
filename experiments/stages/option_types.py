"""Explains in one sentence why a value does not fit its option, and which values the option takes."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from jsonargparse import _typehints
from pydantic import TypeAdapter, ValidationError
from pydantic_core import core_schema

from experiments.registry.files import parse_yaml
from retrieval import protocols

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    Path: "a path",
    timedelta: "a duration",
    type(None): "null",
}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
SEQUENCES = (list, tuple, set, frozenset)
Import = Callable[[str], Any]


def misfit(value: Any, hint: Any, path: str, load: Import) -> str | None:
    """Return why an option's value does not fit its type annotation, or None if it fits or the annotation is unknown.

    Compares only the class path of an object. The caller checks the arguments of the object.

    Args:
        path: dotted name of the option.
        load: imports the class of a class path. Raises ExperimentError.
    """
    faults = [_misfit_of_member(value, member, path, load) for member in _members(hint)]
    if None in faults:
        return None
    plain = f"'{path}' is {_shown(value)}"
    inner = [fault for fault in faults if fault and fault != plain]
    return inner[0] if inner else f"{plain}; expected {describe(hint)}"


def describe(hint: Any) -> str:
    """Return in words which values a type annotation accepts.

    >>> describe(int | None)
    'a whole number or null'
    """
    hint, *others = _members(hint)
    if others:
        return " or ".join(dict.fromkeys(map(describe, (hint, *others))))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [f"{words} {getattr(mark, name)}" for name, words in BOUNDS.items() for mark in arguments[1:]
                  if hasattr(mark, name)]  # fmt: skip
        return f"{describe(arguments[0])} {' and '.join(bounds)}".strip()
    if origin is Literal:
        return f"{'one of ' if len(arguments) > 1 else ''}{', '.join(map(repr, arguments))}"
    if _is_list(hint):
        if _is_fixed(hint):
            return f"a list of {len(arguments)}: {', '.join(map(describe, arguments))}"
        of = [f" of {describe(a)}" for a in arguments[:1] if not isinstance(a, typing.TypeVar)]
        return f"a list{of[0] if of else ''}"
    if _is_mapping(hint):
        return f"a mapping of names to {describe(arguments[1])}" if len(arguments) == 2 else WORDS[dict]
    if hint in WORDS:
        return WORDS[hint]
    name = getattr(origin or hint, "__name__", str(hint))
    return f"class_path and init_args of {'an' if name[0] in 'AEIOU' else 'a'} {name}"


def takes_null(hint: Any) -> bool:
    """Return whether a type annotation allows null."""
    return hint is Any or any(member in (None, type(None), Any) for member in _members(hint) if member.__hash__)


def built_from(value: Any, hint: Any) -> type | None:
    """Return the class that a mapping without ``class_path`` configures, from the option's annotation; None for other
    values."""
    if not isinstance(value, Mapping) or "class_path" in value:
        return None
    kinds = (m for m in _members(hint) if inspect.isclass(m) and m not in (*WORDS, Any, object))
    return next((kind for kind in kinds if not _is_list(kind) and not _is_mapping(kind)), None)


def names_class(value: Any, hint: Any) -> bool:
    """Return whether an option's text is the class path of an object without arguments."""
    if not isinstance(value, str) or "." not in value:
        return False
    members = _members(hint)
    return str not in members and any(inspect.isclass(m) and m not in (*WORDS, Any, object) for m in members)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        value = value["class_path"]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a Union annotation with aliases resolved, null last; other annotations alone."""
    hint = getattr(hint, "__value__", hint)  # of an alias with a name
    if typing.get_origin(hint) in (Union, types.UnionType):
        found = [member for part in typing.get_args(hint) for member in _members(part)]
        return tuple(sorted(dict.fromkeys(found), key=lambda member: member in (None, type(None))))
    return (hint,)


def _misfit_of_member(value: Any, hint: Any, path: str, load: Import) -> str | None:
    """Return why a value does not fit an annotation other than a Union, or None. A fault of a part begins with the
    part's path."""
    if hint is Any:
        return None
    plain = f"'{path}' is {_shown(value)}"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return None if value is None or value in ("null", "None") else plain
    if origin is Literal:
        return None if read(value) in arguments or value in arguments else plain
    if origin is Annotated or hint in (bool, int, float):
        return _misfit_of_scalar(value, hint, plain)
    if hint is str:
        return None if isinstance(value, str) else plain
    if _is_list(hint):
        return _misfit_of_list(value, hint, path, load)
    if _is_mapping(hint):
        if not isinstance(value, Mapping):
            return plain
        of = arguments[1] if len(arguments) == 2 else Any
        return next(filter(None, (misfit(part, of, f"{path}.{key}", load) for key, part in value.items())), None)
    if inspect.isclass(hint) and hint not in (*WORDS, object):
        return _misfit_of_object(value, hint, path, load)
    return None


def _misfit_of_list(value: Any, hint: Any, path: str, load: Import) -> str | None:
    arguments = typing.get_args(hint)
    if not isinstance(value, SEQUENCES) or (_is_fixed(hint) and len(value) != len(arguments)):
        return f"'{path}' is {_shown(value)}"
    of = arguments[0] if arguments and not isinstance(arguments[0], typing.TypeVar) else Any
    kinds = arguments if _is_fixed(hint) else [of] * len(value)
    parts = enumerate(zip(value, kinds, strict=True))
    return next(filter(None, (misfit(part, kind, f"{path}[{i}]", load) for i, (part, kind) in parts)), None)


def _misfit_of_object(value: Any, hint: Any, path: str, load: Import) -> str | None:
    """Return why a value does not configure an object of the class ``hint``, or None if it does. The value may be a
    mapping with a class path, a class path alone, or the arguments of the class."""
    class_path = value.get("class_path") if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "class_path" not in value:
        return None if not _typehints.is_protocol(hint) else f"'{path}' is {_shown(value)}"
    if not isinstance(class_path, str):
        return f"'{path}' is {_shown(value)}"
    if "." not in class_path:  # the name of a subclass that Lightning knows
        return None if class_path in _names_of_subclasses(hint) else f"'{path}' is {_shown(value)}"
    target = load(class_path)
    if not inspect.isclass(target):
        return None
    if _typehints.is_protocol(hint):
        reason = protocols.mismatch(target, hint, _typehints.get_protocol_members(hint))
        return reason and f"'{path}': {class_path} does not fit {hint.__name__}: {reason}"
    if not issubclass(target, hint):
        return f"'{path}': {class_path} does not fit {hint.__name__}; expected {describe(hint)}"
    return None


def _names_of_subclasses(kind: type) -> set[str]:
    return {kind.__name__}.union(*(_names_of_subclasses(sub) for sub in kind.__subclasses__()))


def _misfit_of_scalar(value: Any, hint: Any, plain: str) -> str | None:
    """Return why a value is not the expected bool or number, or None if it is; text is parsed as YAML. The message of a
    range's own validator replaces its bounds."""
    value = read(value)
    if isinstance(value, bool) or hint is bool:
        return None if hint is bool and isinstance(value, bool) else plain
    if hint is int:
        return None if isinstance(value, int) else plain
    try:
        adapter(hint).validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        own = fault["type"] not in typing.get_args(core_schema.ErrorType)
        return f"{plain}; {fault['msg'].replace('Input should be', 'expected')}" if own else plain
    return None


def read(value: Any) -> Any:
    """Parse text as YAML and return the value. Return other values, and text that is not YAML, unchanged."""
    try:
        return parse_yaml(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value


@lru_cache(maxsize=256)
def adapter(hint: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator for a type annotation, built once."""
    return TypeAdapter(hint)


def _is_list(hint: Any) -> bool:
    return _is_container(hint, Iterable) and not _is_mapping(hint)


def _is_fixed(hint: Any) -> bool:
    """Return whether an annotation gives each member of a list its own type (``tuple[float, int]``)."""
    arguments = typing.get_args(hint)
    return typing.get_origin(hint) is tuple and bool(arguments) and Ellipsis not in arguments


def _is_mapping(hint: Any) -> bool:
    return _is_container(hint, Mapping)


def _is_container(hint: Any, kind: type) -> bool:
    origin = typing.get_origin(hint) or hint
    of_python = inspect.isclass(origin) and origin.__module__ in ("builtins", "collections.abc")
    return of_python and origin is not str and issubclass(origin, kind)
