"""Requests and generations as JSON. Floats survive the way exactly: JSON writes Python's shortest exact form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rollout.engines.base import Generation, SamplingParams


def request_to_json(token_ids: Sequence[int], sampling: SamplingParams, weights: str) -> dict[str, Any]:
    """``weights``: tag of the push that the server must hold."""
    return {"token_ids": list(token_ids), "sampling": dataclasses.asdict(sampling), "weights": weights}


def request_from_json(body: Any) -> tuple[list[int], SamplingParams, str]:
    """Raises ValueError if it is no request."""
    try:
        ids, sampling, weights = body["token_ids"], body["sampling"], body["weights"]
        params = SamplingParams(**{name: _frozen(value) for name, value in sampling.items()})
        if not isinstance(weights, str) or not all(type(i) is int for i in ids):
            raise TypeError("token_ids must be integers, weights a text")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no request for tokens: {error}; expected token_ids, sampling and weights") from None
    return list(ids), params, weights


def generation_to_json(generation: Generation) -> dict[str, Any]:
    body = {f.name: getattr(generation, f.name) for f in dataclasses.fields(generation)}
    if generation.top_logprobs is not None:  # the keys of a JSON object are texts
        body["top_logprobs"] = [list(entry.items()) for entry in generation.top_logprobs]
    return body


def generation_from_json(body: dict[str, Any]) -> Generation:
    """Raises ValueError if it is no generation."""
    try:
        values = {name: _frozen(value) for name, value in body.items()}
        if body["top_logprobs"] is not None:
            values["top_logprobs"] = tuple({int(i): p for i, p in entry} for entry in body["top_logprobs"])
        return Generation(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no generation: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
