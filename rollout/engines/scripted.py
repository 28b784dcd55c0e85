"""An engine that answers from a script: for tests of whatever stands above the engine. In process, no model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.engines.base import Generation, SamplingParams
from rollout.trajectory import InfrastructureError

if TYPE_CHECKING:
    import torch

Reply = str | Sequence[int] | Exception
Script = Callable[[tuple[int, ...], SamplingParams], Reply] | Mapping[tuple[int, ...], Reply] | Sequence[Reply]


@dataclass(frozen=True, slots=True)
class Request:
    """What `ScriptedEngine` was asked, in order of arrival."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    policy_version: int


class ScriptedEngine:
    """Replies by a script, cut at ``max_new_tokens``, stop token ids and stop strings as a real engine would.

    ``script`` is a function of (token ids, sampling), a table from token ids to replies, or a list consumed in order
    of arrival. A reply is a text (tokenised here), token ids, or an exception to raise. Each reply takes ``latency``
    seconds (a number or a function of the token ids); ``peak_concurrency`` and ``requests`` are records for asserts.
    Each token's log-prob is ``logprob``. ``load_weights`` records names and shapes in ``weights``.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Any = None,
        latency: float | Callable[[tuple[int, ...]], float] = 0.0,
        logprob: float = -0.5,
    ) -> None:
        """``tokenizer``: a Hugging Face tokenizer; needed for text replies and stop strings."""
        self._script, self._tokenizer, self._latency, self._logprob = script, tokenizer, latency, logprob
        self._next = 0
        self._in_flight = 0
        self._alive = False
        self.peak_concurrency = 0
        self.policy_version = 0
        self.requests: list[Request] = []
        self.weights: dict[str, tuple[int, ...]] = {}

    async def start(self) -> None:
        self._alive = True

    async def close(self) -> None:
        """As of a real engine's process, nothing is left of the weights it was given."""
        self._alive = False
        self.policy_version = 0

    def kill(self) -> None:
        """From now on the engine behaves as one whose process has died."""
        self._alive = False

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """See `base.Engine.generate`. Raises InfrastructureError before `start`, and after `close` or `kill`, and
        IndexError or KeyError where the script has no reply."""
        ids = tuple(token_ids)
        self._check_alive()
        version = self.policy_version
        self.requests.append(Request(ids, sampling, version))
        self._in_flight += 1
        self.peak_concurrency = max(self.peak_concurrency, self._in_flight)
        try:
            reply = self._reply(ids, sampling)
            await asyncio.sleep(self._latency(ids) if callable(self._latency) else self._latency)
            self._check_alive()
        finally:
            self._in_flight -= 1
        if isinstance(reply, Exception):
            raise reply
        return self._cut(self._tokens(reply), sampling, version)

    async def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._check_alive()
        self.weights = {name: tuple(tensor.shape) for name, tensor in tensors}
        self.policy_version = version

    def _check_alive(self) -> None:
        if not self._alive:
            raise InfrastructureError("the scripted engine is not running")

    def _reply(self, ids: tuple[int, ...], sampling: SamplingParams) -> Reply:
        if callable(self._script):
            return self._script(ids, sampling)
        if isinstance(self._script, Mapping):
            return self._script[ids]
        self._next += 1
        return self._script[self._next - 1]

    def _tokens(self, reply: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(reply, str):
            return tuple(reply)
        if self._tokenizer is None:
            raise ValueError("a text reply needs a tokenizer; give ScriptedEngine one, or reply with token ids")
        return tuple(self._tokenizer.encode(reply, add_special_tokens=False))

    def _cut(self, ids: tuple[int, ...], sampling: SamplingParams, version: int) -> Generation:
        """End where a real engine would have. A reply that runs out without any stop counts as "length"."""
        reason, stop_string = "length", None
        ids = ids[: sampling.max_new_tokens]
        for end in range(1, len(ids) + 1):
            if ids[end - 1] in sampling.stop_token_ids:
                ids, reason = ids[:end], "eos"
                break
            text = self._tokenizer.decode(ids[:end]) if sampling.stop and self._tokenizer is not None else ""
            found = [s for s in sampling.stop if s in text]
            if found:
                ids, reason, stop_string = ids[:end], "stop", found[0]
                break
        top = None
        if sampling.top_logprobs:
            top = tuple({token: self._logprob} for token in ids)
        return Generation(ids, (self._logprob,) * len(ids), reason, version, stop_string, top)


def fingerprint(token_ids: Sequence[int]) -> int:
    """A number that depends on the ids alone (not on PYTHONHASHSEED): for scripts that want varied, repeatable
    replies or latencies."""
    return int.from_bytes(hashlib.sha256(repr(tuple(token_ids)).encode()).digest()[:8])
