"""The agent loop: runs one trajectory from its prompt to its stop reason.

Each turn the engine samples, the protocol parses and the environment acts. Every trajectory is a separate asyncio task,
so a slow tool delays only its own trajectory.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from common.errors import one_line
from rollout.engines.base import Engine, EngineGone, Generation, SamplingParams
from rollout.environments.base import Environment, EnvironmentFactory, FirstObservation, StepResult
from rollout.loop.guide import plays
from rollout.loop.running_trajectory import RunningTrajectory, TurnGenerator
from rollout.protocols.base import (
    FIRST_OBSERVATION,
    OWN_QUESTION,
    ChatProtocol,
    PerTurnPrompts,
    PromptMode,
    sampled_turns,
)
from rollout.samplers.base import NO_HOOKS, Hooks
from rollout.skills.injection import Skills
from rollout.skills.render import token_counter
from rollout.tokenizer import template_errors
from rollout.tools.base import OwnFault, own_faults
from rollout.trajectory import (
    ENDED_HERE,
    Action,
    ActionKind,
    CallOutcome,
    InfrastructureError,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryPrefix,
    Turn,
    scored_by,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a trajectory. All counts are tokens, except ``max_turns`` and ``step_timeout_s``.

    Search-R1 allows four turns with calls and then one more turn, whose calls are refused (``final_turn``). Without
    ``final_turn`` the environment also acts on the last turn, because an environment that scores itself needs it. The
    calls of that turn are executed and counted, and the model never reads their results. (SOD's released code does not
    execute them; the tokens are the same.)
    """

    max_turns: int = 4
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_response_tokens: int = 4096  # all tokens after the prompt
    max_length: int | None = None  # prompt and response together: the engine's limit
    final_turn: bool = True
    step_timeout_s: float | None = None  # limit of one action of the environment
    limit_eos: bool = False  # append an EOS to a call beyond max_turns, and train it like a sampled token

    def __post_init__(self) -> None:
        if self.max_turns < (0 if self.final_turn else 1):
            raise ValueError(f"max_turns is {self.max_turns}; expected at least one turn in all")

    def room(self, held: int, response: int) -> int:
        """Return the number of tokens that a trajectory may still sample; 0 or less: none.

        Args:
            held: length of the context so far: prompt and response, or a turn's own prompt and its tokens.
            response: tokens of the response so far.
        """
        room = self.max_response_tokens - response
        return room if self.max_length is None else min(room, self.max_length - held)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Most tokens that a per-turn prompt may have, so that a whole turn still fits; None without a limit."""
        return None if self.max_length is None else self.max_length - self.max_turn_tokens


@dataclass(frozen=True, slots=True)
class FirstPrompts:
    """Writes the first prompt of a trajectory. ``skills``: adds advice texts to the prompt."""

    protocol: ChatProtocol
    budgets: Budgets
    skills: Skills | None = None

    @property
    def longest(self) -> int | None:
        """Maximum length of a first prompt in tokens, or None without a limit. It leaves room for one sampled token
        (with per-turn prompts: for a whole turn)."""
        if isinstance(self.protocol, PerTurnPrompts) and self.protocol.per_turn_prompts:
            return self.budgets.max_prompt_tokens
        return None if self.budgets.max_length is None else self.budgets.max_length - 1

    def with_skills(self, task: Task) -> Task:
        """Return the task with advice texts (skills) added, if there are any. Raises ValueError, see
        ``Skills.inject``."""
        if self.skills is None:
            return task
        count = token_counter(self.protocol.tokenizer)
        return dataclasses.replace(task, skills=self.skills.inject(task, task.question, count).text)

    def prompt_ids(self, task: Task) -> list[int]:
        """Return the token ids [P] of a task's first prompt. Raises ValueError if the protocol refuses the task, or the
        skills do not fit."""
        return written(self.protocol, self.with_skills(task), PromptMode.AGENT)


def written(protocol: ChatProtocol, task: Task, mode: PromptMode) -> list[int]:
    """Return the token ids [P] of a task's prompt, at least one.

    Raises ValueError if the protocol or its chat template refuses the task, or the prompt is empty."""
    with template_errors(protocol.tokenizer):
        ids = protocol.prompt_ids(task, mode)
    if not ids:
        raise ValueError(f"task {task.id}: its prompt is empty; expected a chat template that writes the messages")
    return ids


@runtime_checkable
class Resumable(Protocol):
    """An environment that can repeat earlier actions, so that a fork can start from its parent's state."""

    async def resume(self, turns: Sequence[Turn], calls: Sequence[ToolCall]) -> float | None:
        """Repeat the actions of the parent's ``turns``. Returns the reward so far, or None if the environment has no
        rewards."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """The settings of one trajectory that do not change between turns."""

    seed: int
    sampling: SamplingParams
    mode: PromptMode = PromptMode.AGENT
    hooks: Hooks = NO_HOOKS
    inject_skills: bool = True  # add the loop's skills, if any, to the prompt
    guided: float = 0.0  # probability that the guide plays a turn


class AgentLoop:
    """Runs trajectories on one engine. Any number of ``run`` calls may be in flight at once.

    Args:
        entropy_tokens: every turn records the entropy of this many first tokens (``Turn.entropy``), even if the sampler
            does not use entropies. 0: only if the sampler does.
        skills: adds advice on the task to the prompt of agents.
        guide: plays the turns that ``Request.guided`` draws.
    """

    def __init__(
        self,
        engine: Engine,
        protocol: ChatProtocol,
        environment: EnvironmentFactory,
        budgets: Budgets,
        entropy_tokens: int = 0,
        top_logprobs: int = 10,
        skills: Skills | None = None,
        guide: Engine | None = None,
    ) -> None:
        self.skills = skills
        self.engine, self.protocol, self.environment, self.budgets = engine, protocol, environment, budgets
        self._turns = TurnGenerator(engine, protocol, entropy_tokens, top_logprobs, guide)
        self._per_turn = protocol if isinstance(protocol, PerTurnPrompts) and protocol.per_turn_prompts else None
        self._latest_prompt: tuple[Task, PromptMode, list[int]] | None = None
        self.failures: deque[str] = deque(maxlen=20)  # the latest reasons of infrastructure failures

    def with_budgets(self, budgets: Budgets) -> AgentLoop:
        """Return a copy of the agent loop with other limits."""
        loop = copy.copy(self)
        loop.budgets = budgets
        return loop

    @property
    def first_prompts(self) -> FirstPrompts:
        return FirstPrompts(self.protocol, self.budgets, self.skills)

    async def run(
        self,
        task: Task,
        *,
        group: str,
        index: int,
        request: Request,
        start: TrajectoryPrefix | None = None,
        at: int = 0,
        key: int | str | None = None,
    ) -> Trajectory:
        """Roll out and return one trajectory. With ``start`` (another trajectory) it is a fork that shares the first
        ``at`` response tokens.

        Awaits the callbacks of ``request.hooks`` on the way. A failing service or environment ends the trajectory with
        INFRASTRUCTURE; its tokens are kept. Raises EngineGone, and any other exception (a bug, a wrong configuration).

        Args:
            key: the seeds are derived from it; by default from the index.
        """
        began = time.monotonic()
        state = RunningTrajectory(task, group, index, key=index if key is None else key)
        with scored_by(self.environment, state):
            reason = await self._run(state, request, start, at)
            return state.finish(reason, time.monotonic() - began)

    async def _run(
        self, state: RunningTrajectory, request: Request, start: TrajectoryPrefix | None, at: int
    ) -> StopReason:
        try:
            environment = self._make_environment(state.task, request.mode)
            try:
                await self._open(state, environment, request, start, at)
                return await self._play(state, environment, request)
            finally:
                await _ask(environment, "close", object)
        except EngineGone:
            raise
        except InfrastructureError as error:
            logger.warning("trajectory %s/%d failed by infrastructure: %s", state.group, state.index, error)
            self.failures.append(str(error))
            return StopReason.INFRASTRUCTURE

    def _make_environment(self, task: Task, mode: PromptMode) -> Environment:
        """Return a new environment for ``task`` from the factory. Raises InfrastructureError for any exception of the
        factory."""
        try:
            with own_faults():
                return self.environment(task, tools_enabled=mode is PromptMode.AGENT)
        except OwnFault as fault:
            name = getattr(self.environment, "__name__", type(self.environment).__name__)  # a class or a factory
            raise InfrastructureError(f"{name} raised {fault} when it made an environment") from fault.__cause__

    async def _open(
        self,
        state: RunningTrajectory,
        environment: Environment,
        request: Request,
        start: TrajectoryPrefix | None,
        at: int,
    ) -> None:
        first = await _ask(environment, "reset", FirstObservation | None)
        if first is not None:  # replaces the question
            facts = {OWN_QUESTION: state.task.question, **state.task.metadata, FIRST_OBSERVATION: first.info}
            state.task = dataclasses.replace(state.task, question=first.text, prompt=(), metadata=facts)
            state.environment_reward, state.measures = 0.0, dict(first.measures)
        if start is None:
            if request.inject_skills and request.mode is PromptMode.AGENT:
                state.task = self.first_prompts.with_skills(state.task)
            try:
                state.prompt_ids = self._prompt_ids(state.task, request.mode)
            except ValueError as error:
                if first is None:  # the task's own fault
                    raise
                raise InfrastructureError(f"{type(environment).__name__}.reset: {one_line(error)}") from error
            return
        state.task = dataclasses.replace(state.task, skills=start.task.skills)  # the inherited prompt contains them
        state.continue_from(start, at)
        if state.turns:
            if not isinstance(environment, Resumable):
                raise TypeError(f"{type(environment).__name__} has no method resume, which forks need")
            state.environment_reward = await _ask(environment, "resume", object, state.turns, state.calls)

    def _prompt_ids(self, task: Task, mode: PromptMode) -> list[int]:
        """Return the token ids of a task's prompt. The last prompt is cached, because the trajectories of a group start
        one after the other."""
        if self._latest_prompt is None or self._latest_prompt[0] is not task or self._latest_prompt[1] is not mode:
            self._latest_prompt = (task, mode, written(self.protocol, task, mode))
        return list(self._latest_prompt[2])

    async def _play(self, state: RunningTrajectory, environment: Environment, request: Request) -> StopReason:
        max_turns = 0 if request.mode is PromptMode.GOLD_DIRECT else self.budgets.max_turns
        hooks = request.hooks
        while self._write_prompt(state) and self._room(state) > 0:
            state.last_turn = len(state.turns) + (0 if self.budgets.final_turn else 1) >= max_turns
            generation = await self._generate(state, request)
            action = self._parse(state, generation, request.mode)
            state.add_turn(generation, action)
            if hooks.on_turn is not None:
                await hooks.on_turn(state, generation)
            ending = self._ending(state, action, max_turns)
            if ending not in (None, StopReason.ANSWER):
                refused = ToolResult("", CallOutcome.REFUSED, detail=f"{ENDED_HERE}: {ending}")
                state.add_calls(action, [refused] * len(action.calls), [0.0] * len(action.calls))
                if self.budgets.limit_eos and ending is StopReason.MAX_TURNS and action.kind is ActionKind.CALL:
                    state.append_to_turn(self.protocol.tokenizer.eos_token_id)
                return ending
            step = await self._step(environment, action)
            stopped = self._take(state, step, action, max_turns)
            if stopped is not None:
                return stopped
            if hooks.on_result is not None:
                await hooks.on_result(state)
        return StopReason.LENGTH

    async def _step(self, environment: Environment, action: Action) -> StepResult:
        """Pass an action to the environment and return its result. The environment also receives answers and invalid
        actions."""
        limit = asyncio.timeout(self.budgets.step_timeout_s)
        try:
            async with limit:
                step = await _ask(environment, "step", StepResult, action)
        except TimeoutError:
            raise InfrastructureError(
                f"{type(environment).__name__} did not answer an action within {self.budgets.step_timeout_s:g} s "
                "(rollouts.step_timeout_s)"
            ) from None
        if not len(action.calls) == len(step.results) == len(step.latencies_s):
            raise InfrastructureError(
                f"{type(environment).__name__}.step returned {len(step.results)} results and {len(step.latencies_s)} "
                f"latencies for {len(action.calls)} calls; expected one of each for every call"
            )
        return step

    def _write_prompt(self, state: RunningTrajectory) -> bool:
        """Write the next turn's prompt, if the protocol has per-turn prompts. Returns False if the prompt does not
        fit."""
        if self._per_turn is not None:
            limit = self.budgets.max_prompt_tokens
            sampled = sampled_turns(state.response_ids, state.turns)
            prompt = self._per_turn.turn_prompt(state.task, state.turns, state.calls, limit, sampled=sampled)
            state.turn_prompt, state.prompt_cut = list(prompt.ids), prompt.cut
            return bool(prompt.ids)
        return True

    def _ending(self, state: RunningTrajectory, action: Action, max_turns: int) -> StopReason | None:
        """Return why the trajectory's latest turn is its last, as far as known before the environment acts; else
        None."""
        if action.kind is ActionKind.ANSWER:
            return StopReason.ANSWER
        if action.kind is ActionKind.INVALID and self.protocol.eos_ends and state.turns[-1].finish_reason == "eos":
            return StopReason.EOS
        if self._room(state) <= 0:
            return StopReason.LENGTH
        if self.budgets.final_turn and len(state.turns) > max_turns:
            return StopReason.MAX_TURNS
        return None

    def _take(self, state: RunningTrajectory, step: StepResult, action: Action, max_turns: int) -> StopReason | None:
        """Record the environment's result in the trajectory, and append the observation. Returns why the trajectory
        ends, or None."""
        state.add_calls(action, step.results, step.latencies_s)
        if step.reward is not None:
            state.credit(step.reward)
        state.measures.update(step.measures)
        failed = [result.detail for result in step.results if result.outcome is CallOutcome.INFRASTRUCTURE]
        if failed:
            raise InfrastructureError("; ".join(str(detail) for detail in failed))
        if action.kind is ActionKind.ANSWER:
            state.answer = action.answer
            return StopReason.ANSWER
        if step.done:
            return StopReason.ENVIRONMENT_DONE
        if not self.budgets.final_turn and len(state.turns) >= max_turns:
            return StopReason.MAX_TURNS
        if state.turn_prompt is not None:
            return None  # the next turn's prompt contains the observation
        budget = min(self.budgets.max_observation_tokens, self._room(state) - 1)  # at least one token must follow
        token_ids, truncated = self.protocol.observation_ids(action, step.results, max(budget, 0))
        if len(token_ids) > budget or not token_ids:
            return StopReason.LENGTH  # not even the tags fit
        state.add_observation(token_ids, truncated)
        return None

    def _room(self, state: RunningTrajectory) -> int:
        return self.budgets.room(sum(map(len, state.context)), len(state.response_ids))

    async def _generate(self, state: RunningTrajectory, request: Request) -> Generation:
        state.guided = plays(request.guided, request.seed, state.group, state.key, len(state.turns))
        in_turn = len(state.response_ids) - state.turn_start
        allowed = min(self.budgets.max_turn_tokens, request.sampling.max_new_tokens) - in_turn
        allowed = max(min(allowed, self._room(state)), 1)
        return await self._turns.generate(state, request.sampling, request.seed, request.hooks, allowed)

    def _parse(self, state: RunningTrajectory, generation: Generation, mode: PromptMode) -> Action:
        turn_ids = state.response_ids[state.turn_start :] + list(generation.token_ids)
        return self.protocol.parse(self.protocol.decode(turn_ids), mode)


async def _ask(environment: Any, method: str, expected: Any, *arguments: Any) -> Any:
    """Call and await a method of an environment, and return its result. Raises InfrastructureError for any exception,
    or a result of another type."""
    where = f"{type(environment).__name__}.{method}"
    try:
        with own_faults():
            returned = await getattr(environment, method)(*arguments)
    except OwnFault as fault:
        raise InfrastructureError(f"{where} raised {fault}") from fault.__cause__
    if not isinstance(returned, expected):
        name = getattr(expected, "__name__", str(expected))
        raise InfrastructureError(f"{where} returned {type(returned).__name__}; expected {name}")
    return returned
