"""Says in one line why data does not fit its type."""

from __future__ import annotations

from reprlib import repr as short_repr

from pydantic import ValidationError


def first_problem(error: ValidationError, whole: str = "") -> str:
    """Say in one line where the first problem is, with the expected type and the value. ``whole`` names all the data.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(dict[str, list[int]]).validate_json(b'{"a": [1, "b"]}')
    ... except ValidationError as error:
    ...     first_problem(error)
    "a[1]: Input should be a valid integer, unable to parse string as an integer; found 'b'"
    """
    problem = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"] if part is not None)
    reason = problem.get("ctx", {}).get("error", problem["msg"])
    place = f"{where.lstrip('.') or whole}: ".removeprefix(": ")
    return f"{place}{reason}; found {short_repr(problem['input'])}"
