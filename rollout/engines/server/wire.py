"""Requests and generations as JSON. Floats survive the way exactly: JSON writes Python's shortest exact form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Len
from pydantic import ConfigDict, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError, with_config

from rollout.engines.base import Generation, SamplingParams

Tag = Annotated[StrictStr, Len(1, 200)]  # of a push
Version = Annotated[StrictInt, Ge(0)]
_strict = with_config(ConfigDict(extra="forbid"))


@_strict
@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Body of ``POST /generate``."""

    token_ids: Annotated[list[Annotated[StrictInt, Ge(0)]], Len(1)]
    sampling: SamplingParams
    weights: StrictStr  # tag of the push that the server must hold


@_strict
@dataclass(frozen=True, slots=True)
class SeesRequest:
    """Body of ``POST /weights/sees``."""

    path: StrictStr


@_strict
@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Body of ``POST /weights/load``. ``replaces``: load only if the server still holds this push."""

    tag: Tag
    version: Version
    paths: Annotated[list[StrictStr], Len(1, 10_000)]
    replaces: StrictStr | None = None
    between_steps: StrictBool = False


@_strict
@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Body of ``POST /transfer/METHOD``. ``tag``: of the push, at its start and its finish; ``version``: at its
    finish."""

    arguments: dict[str, Any] = field(default_factory=dict)
    between_steps: StrictBool = False
    tag: Tag | None = None
    version: Version | None = None


REQUEST, GENERATION = TypeAdapter(TokenRequest), TypeAdapter(Generation)
SEES, LOAD, TRANSFER = TypeAdapter(SeesRequest), TypeAdapter(LoadRequest), TypeAdapter(TransferRequest)


def first_problem(error: ValidationError) -> str:
    """What is wrong with a body, in one line.

    >>> try:
    ...     SEES.validate_json(b'{"path": 3}')
    ... except ValidationError as error:
    ...     first_problem(error)
    'path: Input should be a valid string (found 3)'
    """
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"])) or "the body"
    found = repr(problem["input"])
    more = f"; {error.error_count() - 1} more" if error.error_count() > 1 else ""
    shown = found if len(found) <= 60 else f"{found[:60]}..."
    return f"{where}: {problem['msg']} (found {shown}){more}"
