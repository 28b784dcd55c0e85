"""Runs an agent program as one trajectory: from its task to its result, and its requests as rows."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rollout.engines.base import Engine, EngineGone, Generation
from rollout.loop.agent_loop import Budgets, Request
from rollout.programs.base import Model, Program, ProgramError, ProgramResult
from rollout.programs.conversations import Recorded, rows_of
from rollout.programs.endpoint import Endpoint
from rollout.programs.protocol import ProgramProtocol
from rollout.programs.session import Session
from rollout.protocols.base import PromptMode
from rollout.trajectory import (
    LEFT_OUT,
    InfrastructureError,
    Reward,
    StopReason,
    Task,
    Trajectory,
    TrajectoryPrefix,
    scored_by,
)

FAILED = (StopReason.MAX_TURNS, StopReason.LENGTH, StopReason.PROGRAM_TIMEOUT, StopReason.PROGRAM_FAILED)
LEAVE_S = 5.0  # that a program may take to end after it was cancelled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """The requests of a finished rollout, for people."""

    task: str
    chains: Sequence[Sequence[Recorded]]
    ignored: dict[str, int]  # options of requests that the rollout's sampling replaces


class ProgramLoop:
    """Runs programs on one engine, as `AgentLoop` runs its own loop. Any number of ``run`` calls may be in flight.

    Args:
        scored: a reward function scores the trajectories; else the program's reward does, and a rollout without one is
            left out.
    """

    first_prompts = None  # the program writes them

    def __init__(
        self, engine: Engine, protocol: ProgramProtocol, program: Program, budgets: Budgets, scored: bool
    ) -> None:
        self.engine, self.protocol, self.program, self.budgets, self.scored = engine, protocol, program, budgets, scored
        self.endpoint = Endpoint()
        self.failures: deque[str] = deque(maxlen=20)  # the latest reasons of left-out rollouts
        self.reports: deque[Report] = deque(maxlen=20)

    def with_budgets(self, budgets: Budgets) -> ProgramLoop:
        """Return a copy of the loop with other limits."""
        loop = copy.copy(self)
        loop.budgets = budgets
        return loop

    async def start(self) -> None:
        await self.endpoint.start()

    async def close(self) -> None:
        await self.endpoint.close()

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
        """Run the program on a task and return its trajectory, one row per chain (`conversations`).

        ``reward`` is the program's, unless a reward function will score the trajectory. Raises EngineGone, and
        ValueError for a fork or another prompt than the agent's.
        """
        if start is not None or request.mode is not PromptMode.AGENT:
            what = "a fork of a trajectory" if start is not None else f"the prompt {request.mode}"
            raise ValueError(f"a program writes its own prompts and cannot play {what}; leave it out")
        began = time.monotonic()
        parts = (request.seed, group, index if key is None else key)
        watch = request.hooks.on_turn

        async def on_turn(generation: Generation) -> None:
            if watch is not None:
                await watch(cast("Any", rows_of(session.conversations.chains())), generation)

        session = Session(self.engine, self.protocol, self.budgets, request.sampling, parts, on_turn)
        name = f"{group}/{index}"
        result, reason, why = ProgramResult(), StopReason.PROGRAM_DONE, ""
        try:
            with scored_by(self.program, _Named(group, index)), self.endpoint.serve(session) as model:
                result = await self._play(task, model, session)
        except EngineGone:
            raise
        except InfrastructureError as error:
            reason, why = StopReason.INFRASTRUCTURE, str(error)
        except TimeoutError:
            reason, why = session.limit or StopReason.PROGRAM_TIMEOUT, "the program's time was over"
        except OSError as error:  # such as: too many processes, a full disk
            reason, why = StopReason.INFRASTRUCTURE, f"the program could not be run: {error}"
        except ProgramError as error:
            reason, why = session.limit or StopReason.PROGRAM_FAILED, f"the program failed: {error}"
        reward = session.reward if session.reward is not None else result.reward
        if reward is None and reason in FAILED:
            reward = self.program.failure_reward
        if reward is None and not self.scored and reason is not StopReason.INFRASTRUCTURE:
            reason, why = StopReason.UNSCORED, why or "the program returned no reward"
        if reason in LEFT_OUT:
            self.failures.append(why)
        if why:
            logger.log(logging.WARNING if reason in LEFT_OUT else logging.DEBUG, "rollout %s: %s", name, why)
        chains = session.conversations.chains()
        rows = rows_of(chains)
        found = None
        if reward is not None:
            own = {"program": reward}
            found = Reward(reward, own | session.metrics | result.metrics | own)  # no metric replaces it
        trajectory = Trajectory(
            task=task,
            prompt_ids=rows.prompt_ids,
            response_ids=tuple(rows.response_ids),
            loss_mask=tuple(rows.loss_mask),
            logprobs=tuple(rows.logprobs),
            turns=tuple(rows.turns),
            calls=tuple(rows.calls),
            stop_reason=reason,
            group=group,
            index=index,
            reward=None if reason is StopReason.INFRASTRUCTURE else found,
            answer=result.answer,
            seconds=time.monotonic() - began,
            tokens_computed=sum(len(turn.ids) - turn.generation.cached_tokens for turn in session.conversations.turns),
        )
        self.reports.append(Report(name, chains, dict(session.ignored)))
        return trajectory

    async def _play(self, task: Task, model: Model, session: Session) -> ProgramResult:
        """Run the program until it ends or the engine fails. Raises what either raises."""
        playing = asyncio.ensure_future(self.program.run(task, model))
        try:
            await asyncio.wait((playing, session.broken), return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                raise session.broken.result()
            return playing.result()
        finally:
            session.end()
            playing.cancel()
            if not playing.done():
                await asyncio.wait((playing,), timeout=LEAVE_S)
            playing.add_done_callback(_read_error)


def _read_error(playing: asyncio.Future[ProgramResult]) -> None:
    """Read a program's error, which is raised elsewhere or comes too late, so that asyncio does not log it."""
    if not playing.cancelled():
        playing.exception()


@dataclass(frozen=True, slots=True)
class _Named:
    group: str
    index: int
