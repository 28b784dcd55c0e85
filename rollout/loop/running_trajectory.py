"""A trajectory while it is sampled, and how its turns are sampled. Branches copy from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.seeds import derive_seed
from rollout.engines.base import Engine, Generation, SamplingParams
from rollout.protocols.base import ChatProtocol
from rollout.samplers.base import EntropyProbe, Hooks, first_tokens_entropy
from rollout.trajectory import (
    Action,
    ActionKind,
    Fork,
    Reward,
    Runs,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryPrefix,
    Turn,
    finite_number,
    merged,
    recorded,
    runs_of,
)


@dataclass(slots=True)
class RunningTrajectory:
    """A mutable trajectory: the fields of ``Trajectory``, and the state that the agent loop needs."""

    task: Task
    group: str
    index: int
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    key: int | str = 0  # the seeds of its requests are derived from key, group and turn
    open_runs: Runs = ()  # versions of the tokens that an open turn already has
    open_turn: int | None = None  # start of a partly sampled turn: only its first tokens, or forked in its middle
    last_turn: bool = False  # the next turn is the last: its calls are not executed
    entropy: float | None = None  # of the current turn
    guided: bool = False  # the guide samples the current turn
    branch_probability: float | None = None  # of the current turn; a sampler sets it
    environment_reward: float | None = None
    measures: dict[str, float] = field(default_factory=dict)  # the environment's measures of the episode
    turn_prompt: list[int] | None = None  # of the next turn, with per-turn prompts
    prompt_cut: bool = False  # that prompt leaves history out
    answer: str | None = None
    fork: Fork | None = None
    tokens_computed: int = 0

    @property
    def turn_start(self) -> int:
        return len(self.response_ids) if self.open_turn is None else self.open_turn

    @property
    def context(self) -> tuple[list[int], list[int]]:
        """Token ids before the next sampled token: the turn's prompt, and the response ids that follow the prompt."""
        if self.turn_prompt is not None:
            return self.turn_prompt, self.response_ids[self.turn_start :]
        return self.prompt_ids, self.response_ids

    def continue_from(self, source: TrajectoryPrefix, at: int) -> None:
        """Copy the trajectory ``source`` into this one, up to response offset ``at``.

        ``at`` is the start of a turn, or an offset inside a sampled turn, which is then continued. Raises ValueError
        for an offset inside an observation, or after the end of the trajectory.
        """
        kept = [turn for turn in source.turns if turn.observation_end <= at]
        boundary = kept[-1].observation_end if kept else 0
        cut = source.turns[len(kept)] if len(kept) < len(source.turns) else None
        if cut is not None and not cut.start < at < cut.end:
            cut = None
        ended = bool(kept) and kept[-1].end == kept[-1].observation_end  # that turn ended the trajectory
        if (cut is None and at != boundary) or ended:
            raise ValueError(
                f"cannot continue trajectory {source.group}/{source.index} at response offset {at}: expected the "
                "start of a turn, or an offset inside a sampled turn"
            )
        self.prompt_ids = list(source.prompt_ids)
        self.response_ids, self.loss_mask = list(source.response_ids[:at]), list(source.loss_mask[:at])
        self.logprobs, self.turns = list(source.logprobs[:at]), kept
        self.calls = [call for call in source.calls if call.turn < len(kept)]
        self.open_turn = None if cut is None else cut.start
        self.open_runs = () if cut is None else runs_of(cut.policy_version, cut.version_runs, at - cut.start)
        self.fork = Fork(parent=source.index, at=at)

    def count(self, generation: Generation) -> None:
        """Add the tokens that the engine computed for a request to ``tokens_computed``."""
        given = sum(map(len, self.context))
        self.tokens_computed += given - generation.cached_tokens + len(generation.token_ids)

    def open(self, first: Generation) -> None:
        """Open a turn with its first sampled tokens. ``add_turn`` appends the other tokens and closes the turn."""
        self.open_turn = len(self.response_ids)
        self._extend(first.token_ids, 1, first.logprobs)
        self.open_runs = _versions(first)

    def add_turn(self, generation: Generation, action: Action) -> None:
        start = self.turn_start
        self._extend(generation.token_ids, 1, generation.logprobs)
        self.open_runs = merged((*self.open_runs, *_versions(generation)))
        self._close_turn(start, action, generation.finish_reason, generation.policy_version)

    def _close_turn(self, start: int, action: Action, finish_reason: str, policy_version: int) -> None:
        end = len(self.response_ids)
        self.turns.append(
            Turn(
                start,
                end,
                action,
                finish_reason,
                policy_version,
                observation_end=end,
                observation_truncated=self.prompt_cut,
                entropy=self.entropy,
                branch_probability=self.branch_probability,
                prompt_ids=None if self.turn_prompt is None else tuple(self.turn_prompt),
                version_runs=recorded(self.open_runs),
                guided=self.guided,
            )
        )
        self.guided = False
        self.open_turn = self.entropy = self.branch_probability = None
        self.open_runs = ()

    def append_to_turn(self, token_id: int) -> None:
        """Append a token that was not sampled to the last turn, with mask 1 and log-prob 0."""
        self._extend([token_id], 1, [0.0])
        end = len(self.response_ids)
        self.turns[-1] = dataclasses.replace(self.turns[-1], end=end, observation_end=end)

    def add_calls(self, action: Action, results: Sequence[ToolResult], latencies_s: Sequence[float]) -> None:
        turn = len(self.turns) - 1
        for request, result, latency in zip(action.calls, results, latencies_s, strict=True):
            self.calls.append(ToolCall(turn, request, result, latency))

    def add_observation(self, token_ids: Sequence[int], truncated: bool) -> None:
        self._extend(token_ids, 0, [0.0] * len(token_ids))
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], observation_end=len(self.response_ids), observation_truncated=truncated
        )

    def credit(self, reward: float) -> None:
        """Add the environment's reward for the last turn to the trajectory. Raises RewardError unless it is a finite
        number."""
        reward = finite_number(reward, f"the reward of turn {len(self.turns)}")
        self.environment_reward = (self.environment_reward or 0.0) + reward
        self.turns[-1] = dataclasses.replace(self.turns[-1], reward=reward)

    def _extend(self, token_ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.response_ids.extend(token_ids)
        self.loss_mask.extend([mask] * len(token_ids))
        self.logprobs.extend(logprobs)

    def finish(self, stop_reason: StopReason, seconds: float) -> Trajectory:
        if self.open_turn is not None:  # the engine failed during the turn
            action = Action(ActionKind.INVALID, error="the turn was never completed", ended=False)
            self._close_turn(self.open_turn, action, "length", self.open_runs[-1][0] if self.open_runs else -1)
        reward = self.environment_reward
        return Trajectory(
            task=self.task,
            prompt_ids=tuple(self.prompt_ids),
            response_ids=tuple(self.response_ids),
            loss_mask=tuple(self.loss_mask),
            logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            calls=tuple(self.calls),
            stop_reason=stop_reason,
            group=self.group,
            index=self.index,
            reward=None if reward is None else Reward(reward, {"environment": reward} | self.measures),
            fork=self.fork,
            answer=self.answer,
            seconds=seconds,
            tokens_computed=self.tokens_computed,
        )


def _versions(generation: Generation) -> Runs:
    return runs_of(generation.policy_version, generation.version_runs, len(generation.token_ids))


@dataclass(frozen=True, slots=True)
class TurnGenerator:
    """Samples a trajectory's next turn from the engine. A turn takes one request, or two if the sampler inspects the
    first tokens before the others are sampled.

    Args:
        entropy_tokens, top_logprobs: used for turns whose first tokens the sampler does not want.
    """

    engine: Engine
    protocol: ChatProtocol
    entropy_tokens: int = 0
    top_logprobs: int = 10
    guide: Engine | None = None

    async def generate(
        self, state: RunningTrajectory, sampling: SamplingParams, seed: int, hooks: Hooks, allowed: int
    ) -> Generation:
        """Sample and return the rest of a trajectory's current turn, at most ``allowed`` tokens.

        If the hook read the first tokens before the others, these are already in ``state`` as an open turn, and the
        result has only the others. Seeds are derived from (seed, group, key, turn); for the others also from "rest".
        """
        parts = (seed, state.group, state.key, len(state.turns))
        if state.guided and self.guide is not None:
            return await self._ask(state, sampling, allowed, derive_seed(*parts), engine=self.guide)
        if state.open_turn is not None:  # forked in its middle: the parent sampled its first tokens
            rest = await self._ask(state, sampling, allowed, derive_seed(*parts))
            return self._cut_across_boundary(state, rest)
        probe = EntropyProbe.BEFORE_THE_REST if hooks.probe is None else hooks.probe(state)
        count, top = self.entropy_tokens, self.top_logprobs if self.entropy_tokens else 0
        if hooks.first_tokens and probe is not EntropyProbe.NONE:
            count, top = hooks.first_tokens, hooks.top_logprobs
        shown = None if probe is EntropyProbe.NONE else hooks.on_first_tokens
        asked = allowed if shown is None or probe is EntropyProbe.WITH_TURN else min(count, allowed)
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
        self,
        state: RunningTrajectory,
        sampling: SamplingParams,
        tokens: int,
        seed: int,
        top: int = 0,
        engine: Engine | None = None,
    ) -> Generation:
        prompt, sampled = state.context
        generation = await (engine or self.engine).generate(
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
        """Return a generation, cut after a stop string that spans two requests: after "</sea" the turn ends with
        "rch>".

        Engines miss such a string, because they search only the tokens of their own request."""
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
