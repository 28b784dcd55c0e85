"""Checks values of configurations and files, and reports faults in one line."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import repr as short_repr
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def validated(kind: TypeAdapter[T], data: Any, what: str) -> T:
    """Check plain JSON ``data`` against a type, and return it as an object of that type. Lists become tuples; other
    values are not converted.

    Args:
        what: name of the data, for the message.

    Raises:
        ValueError: the first fault, with its place, the value found and the type expected.
    """
    try:
        return kind.validate_json(orjson.dumps(data), strict=True)
    except ValidationError as error:
        raise ValueError(f"{what}: {first_problem(error)}") from None


def first_problem(error: ValidationError, whole: str = "") -> str:
    """Return one line about the first problem of a pydantic error: its place, the expected type and the value.
    ``whole``: name of the data.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(dict[str, list[int]]).validate_json(b'{"a": [1, "b"]}')
    ... except ValidationError as error:
    ...     first_problem(error)
    "a[1]: Input should be a valid integer, unable to parse string as an integer; found 'b'"
    """
    problem = error.errors(include_url=False)[0]
    reason = problem.get("ctx", {}).get("error", problem["msg"])
    place = f"{_path(problem['loc']).lstrip('.') or whole}: ".removeprefix(": ")
    return f"{place}{reason}" + ("" if problem["type"] == "missing" else f"; found {short_repr(problem['input'])}")


def _path(parts: Iterable[str | int | None]) -> str:
    """Return the place of a fault in the data as text, such as ".receptacles[0].number"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part is not None)
