"""Requests and generations as JSON. Floats arrive exactly, because JSON uses Python's shortest exact form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Len
from pydantic import ConfigDict, FailFast, StrictBool, StrictInt, StrictStr, TypeAdapter, with_config

from rollout.engines.base import Generation, SamplingParams

Tag = Annotated[StrictStr, Len(1, 200)]  # of a push
Version = Annotated[StrictInt, Ge(0)]
_strict = with_config(ConfigDict(extra="forbid"))


@_strict
@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Body of ``POST /generate``."""

    token_ids: Annotated[list[Annotated[StrictInt, Ge(0)]], Len(1), FailFast()]
    sampling: SamplingParams
    weights: Tag  # of the push that the server must hold


@_strict
@dataclass(frozen=True, slots=True)
class PathVisibilityRequest:
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
    """Body of ``POST /transfer/METHOD``. ``tag`` identifies the push and comes with its start and finish; ``version``
    comes with its finish."""

    arguments: dict[str, Any] = field(default_factory=dict)
    between_steps: StrictBool = False
    tag: Tag | None = None
    version: Version | None = None


REQUEST, GENERATION = TypeAdapter(TokenRequest), TypeAdapter(Generation)
SEES, LOAD, TRANSFER = TypeAdapter(PathVisibilityRequest), TypeAdapter(LoadRequest), TypeAdapter(TransferRequest)
