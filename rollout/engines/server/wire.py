"""Requests and generations as JSON. Floats survive the way exactly: JSON writes Python's shortest exact form."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import StrictInt, TypeAdapter

from rollout.engines.base import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Body of ``POST /generate``."""

    token_ids: list[StrictInt]
    sampling: SamplingParams
    weights: str  # tag of the push that the server must hold


REQUEST, GENERATION = TypeAdapter(TokenRequest), TypeAdapter(Generation)
