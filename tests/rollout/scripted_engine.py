"""Engine without a model that replies from a script, with simulated latency: for tests of the rollout loop."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.engines.base import Generation, SamplingParams
from rollout.trajectory import InfrastructureError

if TYPE_CHECKING:
    from rollout.engines.weights.files import WeightFiles

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
    of arrival. A reply is a text (tokenised here), token ids, or an exception to raise. A request for exactly the ids
    at which ``max_new_tokens`` cut a reply gets the rest of that reply. Each token's log-prob is ``logprob``, a number
    or a function of the request's token ids. ``load_files`` records names and shapes in ``weights``.

    Time is simulated: a request waits for one of ``slots``, then takes ``latency`` seconds (a number or a function of
    the token ids), ``prefill_s`` for each given token that is in no cache and ``decode_s`` for each sampled one,
    whatever else is computed meanwhile, as in a batch that is not full. ``requests``, ``peak_concurrency`` (requests
    that asked at once) and ``busy_s`` (seconds in which at least one slot was taken) are records.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Any = None,
        latency: float | Callable[[tuple[int, ...]], float] = 0.0,
        logprob: float | Callable[[tuple[int, ...]], float] = -0.5,
        *,
        prefill_s: float = 0.0,
        decode_s: float = 0.0,
        slots: int | None = None,
        prefix_reuse: bool = False,
        top: Callable[[tuple[int, ...]], Mapping[int, float]] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a Hugging Face tokenizer; needed for text replies and stop strings.
            slots: requests computed at once, first come first served; None: any number.
            prefix_reuse: report the longest prefix that an earlier request has left as cached. Nothing is ever evicted.
            top: {token id: log-prob} of the tokens likeliest after the given ids, for requests that ask for them; by
                default the token itself.
        """
        self._script, self._tokenizer, self._latency, self._logprob = script, tokenizer, latency, logprob
        self._prefill_s, self._decode_s, self._slots, self._top = prefill_s, decode_s, slots, top
        self._prefixes: set[int] | None = set() if prefix_reuse else None
        self._free: asyncio.Semaphore | None = None
        self._rests: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._next = 0
        self._in_flight = self._computing = 0
        self._busy_since = 0.0
        self._alive = False
        self.peak_concurrency = 0
        self.busy_s = 0.0
        self.policy_version = 0
        self.requests: list[Request] = []
        self.weights: dict[str, tuple[int, ...]] = {}

    async def start(self) -> None:
        self._alive = True
        self._free = None if self._slots is None else asyncio.Semaphore(self._slots)

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
            async with self._free or contextlib.nullcontext():
                generation = None if isinstance(reply, Exception) else self._generation(ids, reply, sampling, version)
                await self._compute(self._seconds(ids, generation))
            self._check_alive()
        finally:
            self._in_flight -= 1
        if isinstance(reply, Exception):
            raise reply
        assert generation is not None
        return generation

    async def _compute(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time
        self._busy_since = now() if not self._computing else self._busy_since
        self._computing += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._computing -= 1
            self.busy_s += 0.0 if self._computing else now() - self._busy_since

    def _seconds(self, ids: tuple[int, ...], generation: Generation | None) -> float:
        seconds = self._latency(ids) if callable(self._latency) else self._latency
        if generation is None:
            return seconds
        new = len(ids) - generation.cached_tokens
        return seconds + self._prefill_s * new + self._decode_s * len(generation.token_ids)

    async def load_files(self, files: WeightFiles, version: int, between_steps: bool = False) -> None:
        """At once, also with requests in flight: a reply is made when it is asked for, and keeps that version."""
        self._check_alive()
        self.weights = files.shapes()
        self.policy_version = version
        if self._prefixes is not None:
            self._prefixes.clear()

    def _check_alive(self) -> None:
        if not self._alive:
            raise InfrastructureError("the scripted engine is not running")

    def _reply(self, ids: tuple[int, ...], sampling: SamplingParams) -> Reply:
        if rests := self._rests.get(ids):
            return rests.pop()
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

    def _generation(
        self, given: tuple[int, ...], reply: str | Sequence[int], sampling: SamplingParams, version: int
    ) -> Generation:
        whole = self._tokens(reply)
        ids, reason, stop_string = self._cut(whole, sampling)
        if reason == "length" and len(ids) < len(whole):
            self._rests.setdefault(given + ids, []).append(whole[len(ids) :])
        top = None
        if sampling.top_logprobs and self._top is not None:
            top = tuple(dict(self._top(given + ids[:i])) for i in range(len(ids)))
        logprob = self._logprob(given) if callable(self._logprob) else self._logprob
        if sampling.top_logprobs and self._top is None:
            top = tuple({token: logprob} for token in ids)
        cached = self._remember(given, ids)
        return Generation(ids, (logprob,) * len(ids), reason, version, stop_string, top, cached)

    def _cut(self, ids: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], str, str | None]:
        """End where a real engine would have. A reply that runs out without any stop counts as "length"."""
        ids = ids[: sampling.max_new_tokens]
        eos = next((i for i, token in enumerate(ids, start=1) if token in sampling.stop_token_ids), None)
        ids = ids[:eos]
        if sampling.stop and self._tokenizer is not None:

            def found(end: int) -> list[str]:
                text = self._tokenizer.decode(ids[:end])
                return [s for s in sampling.stop if s in text]

            if found(len(ids)):
                end = bisect.bisect_left(range(len(ids)), True, key=lambda end: bool(found(end)))
                return ids[:end], "stop", found(end)[0]
        return ids, "length" if eos is None else "eos", None

    def _remember(self, given: tuple[int, ...], sampled: tuple[int, ...]) -> int:
        """How many of the given ids an earlier request had computed; the last one is always computed anew, and the
        last sampled one never is."""
        if self._prefixes is None:
            return 0
        cached, prefix = 0, 0
        for position, token in enumerate((given + sampled)[:-1]):
            prefix = hash((prefix, token))
            if cached == position < len(given) - 1 and prefix in self._prefixes:
                cached += 1
            self._prefixes.add(prefix)
        return cached


def fingerprint(token_ids: Sequence[int]) -> int:
    """A number that depends on the ids alone (not on PYTHONHASHSEED): for scripts that want varied, repeatable
    replies or latencies."""
    return int.from_bytes(hashlib.sha256(repr(tuple(token_ids)).encode()).digest()[:8])
