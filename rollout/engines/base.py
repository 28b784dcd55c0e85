"""The seam between the agent loop and whatever samples tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollout.versions import Runs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """``temperature == 0`` is greedy. Log-probs are always those of the distribution that was sampled from
    (after temperature, before top-p/top-k truncation), except at temperature 0 where they are the raw ones."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()  # generation ends with the token that completes one of these; the token is kept
    stop_token_ids: tuple[int, ...] = ()  # usually the EOS ids; the token is kept
    seed: int | None = None  # per request; same seed and weights -> same tokens
    top_logprobs: int = 0  # k > 0: also return the k most likely tokens at each position (ARPO's entropy)


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


class Engine(Protocol):
    """Samples continuations. Safe to call concurrently from one event loop."""

    async def start(self) -> None:
        """Load the model, spawn the process. Idempotent."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue ``token_ids``. Raises InfrastructureError if the engine has died."""
        ...

    async def load_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        checksum: bool = False,
        between_steps: bool = False,
    ) -> None:
        """Replace all weights (Hugging Face names), drop every prefix cache, set the policy version.
        Raises ValueError, and changes nothing, if a name or shape does not fit, or, with ``checksum``, if what arrives
        is not what was sent. With ``between_steps`` requests that are under way go on with the new weights."""
        ...

    async def close(self) -> None: ...
