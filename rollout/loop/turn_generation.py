"""Sampling one turn: in one request, or in two, with the sampler's hook after the first tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from common.seeds import derive_seed
from common.versions import recorded, runs_of
from rollout.engines.base import Engine, Generation, SamplingParams
from rollout.protocols.base import ChatProtocol
from rollout.running_trajectory import RunningTrajectory
from rollout.samplers.base import Hooks, Look
from rollout.samplers.entropy import first_tokens_entropy


@dataclass(frozen=True, slots=True)
class TurnGenerator:
    """Asks the engine for turns. ``entropy_tokens`` and ``top_logprobs`` hold where the sampler asks for no first
    tokens.

    Raises:
        ValueError: on construction, if a number is impossible.
    """

    engine: Engine
    protocol: ChatProtocol
    entropy_tokens: int = 0
    top_logprobs: int = 10

    def __post_init__(self) -> None:
        if self.entropy_tokens < 0:
            raise ValueError(f"entropy_tokens is {self.entropy_tokens}; expected 0 (none recorded) or more")
        if self.top_logprobs < 1:
            raise ValueError(f"top_logprobs is {self.top_logprobs}; expected at least 1")

    async def generate(
        self, state: RunningTrajectory, sampling: SamplingParams, seed: int, hooks: Hooks, allowed: int
    ) -> Generation:
        """What completes the turn that ``state`` stands before (or in), at most ``allowed`` tokens in all.

        Where the hook saw the first tokens before the rest, they are in ``state`` already, as an open turn, and the
        result holds the others. Seeds are derived from (seed, group, key, turn), for the others from "rest"
        as well.
        """
        parts = (seed, state.group, state.key, len(state.turns))
        if state.open_turn is not None:  # forked in its middle: how it began is its parent's
            rest = await self._ask(state, sampling, allowed, derive_seed(*parts))
            return self._cut_across_boundary(state, rest)
        look = Look.BEFORE_THE_REST if hooks.look is None else hooks.look(state)
        count, top = self.entropy_tokens, self.top_logprobs if self.entropy_tokens else 0
        if hooks.first_tokens and look is not Look.NONE:
            count, top = hooks.first_tokens, hooks.top_logprobs
        shown = None if look is Look.NONE else hooks.on_first_tokens
        asked = allowed if shown is None or look is Look.WITH_TURN else min(count, allowed)
        first = await self._ask(state, sampling, asked, derive_seed(*parts), top)
        state.entropy = first_tokens_entropy(first.top_logprobs, count)
        if shown is None:
            return first
        await shown(state, first)
        cut = first.finish_reason == "length" and len(first.token_ids) == asked
        if not cut or asked == allowed:
            return first
        state.open(first)
        rest = await self._ask(state, sampling, allowed - asked, derive_seed(*parts, "rest"))
        return self._cut_across_boundary(state, rest)

    async def _ask(
        self, state: RunningTrajectory, sampling: SamplingParams, tokens: int, seed: int, top: int = 0
    ) -> Generation:
        prompt, sampled = state.context
        generation = await self.engine.generate(
            [*prompt, *sampled],
            dataclasses.replace(
                sampling,
                max_new_tokens=tokens,
                stop=self.protocol.stop,
                stop_token_ids=self.protocol.stop_token_ids,
                seed=seed,
                top_logprobs=max(top, sampling.top_logprobs),
            ),
        )
        state.count(generation)
        return generation

    def _cut_across_boundary(self, state: RunningTrajectory, generation: Generation) -> Generation:
        """End the turn at a stop string that began in what it held before, which engines, looking at what they
        generate only, do not see: after "</sea" the turn ends with "rch>"."""
        window = max((len(s.encode()) for s in self.protocol.stop), default=0)  # a token is at least one byte
        before = state.response_ids[state.turn_start :][-window:] if window else []
        for end in range(1, min(window, len(generation.token_ids) + 1)):
            text = self.protocol.decode([*before, *generation.token_ids[:end]])
            found = [s for s in self.protocol.stop if s in text]
            if found:
                top = generation.top_logprobs
                return dataclasses.replace(
                    generation,
                    token_ids=generation.token_ids[:end],
                    logprobs=generation.logprobs[:end],
                    finish_reason="stop",
                    stop_string=found[0],
                    top_logprobs=None if top is None else top[:end],
                    **_cut_versions(generation, end),
                )
        return generation


def _cut_versions(generation: Generation, end: int) -> dict[str, Any]:
    runs = runs_of(generation.policy_version, generation.version_runs, end)
    return {"policy_version": runs[-1][0], "version_runs": recorded(runs)}
