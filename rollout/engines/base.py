"""Engine interface: sampling parameters, generations, and the protocol that every inference engine implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import ConfigDict, with_config

from retrieval.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, TopK
from rollout.trajectory import InfrastructureError
from rollout.versions import Runs

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """``temperature == 0`` is greedy. Log-probs are always those of the distribution that was sampled from
    (after temperature, before top-p/top-k truncation), except at temperature 0 where they are the raw ones."""

    max_new_tokens: PositiveInt
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1
    repetition_penalty: PositiveFloat = 1.0  # divides (or, below 0, multiplies) logits of tokens that occurred; 1: off
    stop: tuple[str, ...] = ()  # generation ends with the token that completes one of these; the token is kept
    stop_token_ids: tuple[NonNegativeInt, ...] = ()  # usually the EOS ids; the token is kept
    seed: NonNegativeInt | None = None  # per request; same seed and weights -> same tokens
    top_logprobs: NonNegativeInt = 0  # k > 0: also return the k most likely tokens at each position (ARPO's entropy)


@dataclass(frozen=True, slots=True)
class Generation:
    token_ids: tuple[int, ...]  # [n] exactly as sampled, incl. the token that completed a stop string
    logprobs: tuple[float, ...]  # [n]
    finish_reason: str  # "stop" (a stop string), "eos" (a stop token id), "length"
    policy_version: int  # weights that sampled it (its last token, where an update came in between)
    stop_string: str | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None  # [n] of {token id: log-prob}
    cached_tokens: int = 0  # of the given token_ids, how many needed no computation (prefix reuse)
    version_runs: Runs = ()  # (version, tokens) in order, where weights changed in between; see rollout.versions


class EngineGone(InfrastructureError):
    """The engine has died once too often. Nothing can be sampled any more: the run ends."""


class WeightsLost(InfrastructureError):
    """The engine does not hold the weights that were pushed last, and samples nothing until a whole push has come."""


class UpdateInterrupted(InfrastructureError):
    """A weight update lost its engine on the way, which is there again and expects a whole push."""


class Engine(Protocol):
    """Samples continuations. Safe to call concurrently from one event loop.

    An engine may say more of itself: ``max_length`` (given plus new tokens of a request, at most), and ``shared =
    True`` where several ranks sample from the same one (`weights.push.SharedEngine`).
    """

    async def start(self) -> None:
        """Load the model, spawn the process. Idempotent."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue ``token_ids``. Raises EngineGone if the engine has died for good."""
        ...

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        """Replace all weights (Hugging Face names), drop every prefix cache, set the policy version. Requests in
        flight finish on the old weights, later ones wait for the new; or, ``between_steps``, all go on with the new
        weights from their next token. The files may be removed when this returns.
        Raises ValueError, and changes nothing, if a name, a shape or a checksum does not fit."""
        ...

    async def close(self) -> None: ...
