"""What is wrong with a request: said to those who sent it, and to nobody else."""

from __future__ import annotations

import logging
from reprlib import repr as short_repr

from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError


def silence_noise() -> None:
    """Keep aiohttp from logging the traceback of a request that is no HTTP. It is answered with 400 all the same."""
    logging.getLogger("aiohttp.server").addFilter(_no_noise)


def _no_noise(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def first_problem(error: ValidationError, whole: str = "") -> str:
    """In one line: where, what was expected, what was found. ``whole``: what to call all of it.

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
