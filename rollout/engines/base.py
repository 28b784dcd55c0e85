"""Engine interface: sampling parameters, generations, and the protocol that every inference engine implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from annotated_types import Le, Len
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from common.ranges import (
    MAX_TOP_LOGPROBS,
    NonNegativeInt,
    Penalty,
    PositiveInt,
    PositiveShare,
    Temperature,
    TopK,
)
from common.validation import first_problem
from rollout.trajectory import InfrastructureError, Runs

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles


@with_config(ConfigDict(extra="forbid", revalidate_instances="always"))
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. ``temperature == 0`` is greedy.

    Log-probs are those of the sampling distribution after temperature and before top-p/top-k truncation. At temperature
    0 they are the raw log-probs. The types bound the cost of a request; `check_request` checks them for every engine.
    """

    max_new_tokens: PositiveInt
    temperature: Temperature = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1
    repetition_penalty: Penalty = 1.0  # divides (or, below 0, multiplies) logits of earlier tokens; 1: off
    # Generation ends with the token that completes one of these strings; the token is kept.
    stop: Annotated[tuple[Annotated[str, Len(1, 256)], ...], Len(0, 64)] = ()
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Len(0, 256)] = ()  # usually the EOS ids; the token is kept
    seed: Annotated[NonNegativeInt, Le(2**63 - 1)] | None = None  # same seed and weights -> same tokens
    # k > 0: return the k most likely tokens at each position (ARPO's entropy).
    top_logprobs: Annotated[NonNegativeInt, Le(MAX_TOP_LOGPROBS)] = 0

    def checked(self) -> SamplingParams:
        """Return the sampling parameters with their declared types (a temperature of 1 becomes 1.0). Raises ValueError
        for the first one out of bounds."""
        try:
            return _SAMPLING.validate_python(self)
        except ValidationError as error:
            raise ValueError(f"sampling.{first_problem(error)}") from None


_SAMPLING = TypeAdapter(SamplingParams)


def check_request(
    token_ids: Sequence[int], sampling: SamplingParams, max_length: int, vocab_size: int | None = None
) -> tuple[list[int], SamplingParams]:
    """Check a request's token ids and sampling parameters, and return both with the right types.

    Args:
        max_length: given plus new tokens, at most.
        vocab_size: of the model (None: the engine checks the ids).

    Raises:
        ValueError: no ids, ids outside the vocabulary, too many tokens, or ``sampling`` is out of bounds.
    """
    ids, sampling = [int(t) for t in token_ids], sampling.checked()
    if not ids:
        raise ValueError("token_ids is empty; expected at least one token")
    if len(ids) + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"{len(ids)} given + {sampling.max_new_tokens} new tokens exceed the engine's max_length {max_length}; "
            "shorten the request or raise max_length"
        )
    if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"token ids are from {min(ids)} to {max(ids)}; expected 0 to {vocab_size - 1}")
    if vocab_size is not None and not max(sampling.stop_token_ids, default=0) < vocab_size:
        raise ValueError(f"sampling.stop_token_ids has {max(sampling.stop_token_ids)}; expected ids below {vocab_size}")
    return ids, sampling


def check_truncation(sampling: SamplingParams, reports_untruncated: bool) -> None:
    """Raise ValueError if the sampling has top-k or top-p and vLLM cannot report log-probs before truncation."""
    truncates = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
    if truncates and not reports_untruncated:
        raise ValueError(
            "this build of vLLM reports log-probs after top-k and top-p only, which would be wrong for training; "
            "sample with top_k=-1 and top_p=1"
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one request."""

    token_ids: tuple[int, ...]  # [n] exactly as sampled, incl. the token that completed a stop string
    logprobs: tuple[float, ...]  # [n]
    finish_reason: str  # "stop" (a stop string), "eos" (a stop token id), "length"
    policy_version: int  # version of the weights that sampled the last token
    stop_string: str | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None  # [n] of {token id: log-prob}
    cached_tokens: int = 0  # number of given tokens that the prefix cache already had
    version_runs: Runs = ()  # (version, tokens) in order, if weights changed in between; see `trajectory.merged`


class EngineGone(InfrastructureError):
    """The engine has died more often than it may be restarted. The run ends."""


class WeightsLost(InfrastructureError):
    """The engine lost the weights of the last push. It samples nothing until all weights are pushed again."""


INTERRUPTED = "the engine was restarted in the middle of a weight update; push all weights again"


class UpdateInterrupted(InfrastructureError):
    """The engine restarted during a weight update. Push all weights again."""


class Engine(Protocol):
    """Samples continuations of token ids. Safe to call concurrently from one event loop.

    Optional attributes: ``max_length`` (given plus new tokens of a request, at most), and ``shared = True`` if several
    ranks sample from the same engine (`weights.push.SharedEngine`).
    """

    async def start(self) -> None:
        """Start the engine: spawn its process and load the model. Idempotent."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Sample and return a continuation of ``token_ids``. Raises EngineGone if the engine has died too often."""
        ...

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        """Replace all weights by those in ``files`` (Hugging Face names), drop every prefix cache, and set the policy
        version.

        Requests in flight finish with the old weights, and later requests wait for the new ones. With ``between_steps``
        all continue with the new weights from their next token. The files may be removed when this returns.
        Raises ValueError, and changes nothing, if a name, a shape or a checksum does not fit."""
        ...

    async def close(self) -> None: ...
