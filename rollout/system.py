"""The rollout system: prompts in, scored trajectories out, behind one synchronous interface, without Lightning."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from common.async_calls import EventLoopThread
from common.ranges import NonNegativeInt, PositiveFloat, PositiveInt, TopLogprobs
from rollout.engines.base import Engine, Generation, SamplingParams
from rollout.engines.weights.push import is_shared, push
from rollout.environments.base import EnvironmentFactory, check_tools, scores_itself
from rollout.loop.agent_loop import AgentLoop, Budgets, FirstPrompts, Request
from rollout.loop.guide import Guide
from rollout.loop.prompt_group import Admission, PromptGroup, Slots, group_names
from rollout.programs.base import Program
from rollout.programs.loop import ProgramLoop
from rollout.programs.protocol import ProgramProtocol, check_program
from rollout.programs.served_model import PROGRAMS_ONLY, ServedModel
from rollout.protocols.base import ChatProtocol, PromptMode
from rollout.protocols.text_protocol import control_tokens
from rollout.rewards.base import AsyncReward, RewardFunction, Scorer
from rollout.samplers.base import IndependentSampler, Sampler, check_forks
from rollout.skills.injection import Skills
from rollout.skills.render import token_counter
from rollout.tools.base import Startable
from rollout.trajectory import Task, Trajectory

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class TestLimits:
    """Limits of turns and tokens in evaluations; None takes the limit of training. See ``agent_loop.Budgets``."""

    __test__ = False  # tell pytest that this is not a test

    max_turns: NonNegativeInt | None = None
    max_turn_tokens: PositiveInt | None = None
    max_response_tokens: PositiveInt | None = None

    def applied(self, budgets: Budgets) -> Budgets:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(budgets, **given)


class RolloutSystem:
    """Rolls out and scores trajectories for prompts.

    Runs engine, tools and trajectories in the event loop of a background thread, so that the caller (a data loader, a
    script) needs no asyncio. The thread starts at ``start`` or at the first use.

    Args:
        engine: samples tokens.
        protocol: writes prompts and parses the model's text into actions.
        environment: executes the calls.
        program: plays the tasks instead of an environment: your own agent, which asks the model for turns
            (docs/own_agent.md). Takes a ``ProgramProtocol``. ``final_turn`` and ``max_observation_tokens`` then have no
            effect, because the program decides what it asks.
        guide: a second engine that plays some turns while the policy trains (Guided-OPD), see ``Guide``.
        reward: scores finished trajectories, in a thread (an ``AsyncReward``: in the event loop). None: the environment
            or the program gives the reward.
        max_turns: turns that may call tools. With ``final_turn`` one more turn follows, whose calls are refused. Of a
            program: turns in all.
        max_turn_tokens, max_observation_tokens, max_response_tokens: see ``agent_loop.Budgets``.
        max_length: prompt and response together; by default ``engine.max_length`` (or the guide's, if that is less).
        concurrency: trajectories in flight at once. Earlier prompts go first, including their forks.
        sampler: chooses which trajectories of a group exist. Diagnostic prompts are always sampled independently.
        entropy_tokens: record the entropy of this many first tokens of every turn (``Turn.entropy``). 0: only if the
            sampler needs it, over its own number of tokens.
        top_logprobs: number of most likely tokens that the entropy is computed from.
        skills: advice in the policy's prompts (Skill-GRPO, skill prompts). SDAR's skills, for the teacher only, are an
            option of its module.
        in_flight_updates: update the weights between two tokens of the trajectories that are in flight; each token
            records the weights that sampled it (``Turn.versions``). By default an update waits until every group that
            has begun is done; groups that have not begun wait for the new weights. Trajectories are in flight during an
            update only with ``data.max_off_policy_iterations``.
        limit_eos: as in ARPO's released code, append an EOS to a call beyond ``max_turns`` and train on it, although it
            was not sampled (vllm_rollout_with_tools.py; docs/algorithms/arpo.md). Its sampler log-prob counts as 0,
            which the mismatch metrics show.
        test_limits: limits of evaluations, if they differ from those of training.
        step_timeout_s: seconds for one action of the environment, including the wait for a busy tool. After that the
            trajectory fails by infrastructure, and the run continues. Null: no limit.
        sleep_mode: free the engine's GPU memory from its start to the first push and while the trainer trains. The
            trainer keeps its optimiser states in host memory while the engine generates (docs/scaling/engines.md). By
            default engine and trainer each keep their memory.
    """

    def __init__(
        self,
        engine: Engine,
        protocol: ChatProtocol,
        environment: EnvironmentFactory | None = None,
        reward: RewardFunction | AsyncReward | None = None,
        max_turns: NonNegativeInt = 4,
        max_turn_tokens: PositiveInt = 500,
        max_response_tokens: PositiveInt = 4096,
        max_observation_tokens: PositiveInt = 500,
        concurrency: PositiveInt = 256,
        max_length: PositiveInt | None = None,
        final_turn: bool = True,
        sampler: Sampler | None = None,
        entropy_tokens: NonNegativeInt = 0,
        top_logprobs: TopLogprobs = 10,
        skills: Skills | None = None,
        in_flight_updates: bool = False,
        limit_eos: bool = False,
        test_limits: TestLimits | None = None,
        step_timeout_s: PositiveFloat | None = 3600.0,
        sleep_mode: bool = False,
        program: Program | None = None,
        guide: Guide | None = None,
    ) -> None:
        if guide is not None:
            check_guide(sampler, program, sleep_mode)
        if sleep_mode:
            check_sleep(engine, in_flight_updates)
        self.sleep_mode = sleep_mode
        self._sleeper: Any = engine if sleep_mode else None
        if self._sleeper is not None:
            self._sleeper.allow_sleep()
        if max_length is None:
            engines = (engine,) if guide is None else (engine, guide.engine)
            limits = [getattr(one, "max_length", None) for one in engines]
            max_length = min((limit for limit in limits if limit is not None), default=None)
        tokens = (max_turn_tokens, max_observation_tokens, max_response_tokens, max_length)
        self.budgets = Budgets(max_turns, *tokens, final_turn, step_timeout_s, limit_eos)
        self.engine, self.protocol, self.reward = engine, protocol, reward
        self.environment, self.program, self.guide = environment, program, guide
        self.sampler: Sampler = sampler or IndependentSampler()
        if getattr(protocol, "per_turn_prompts", False):
            check_forks(self.sampler, type(protocol).__name__)
        self.concurrency, self.in_flight_updates = concurrency, in_flight_updates
        self.waited_s = 0.0  # seconds that updates have waited for trajectories in flight, so far
        if skills is not None and skills.retriever.learns:
            raise ValueError(
                f"{type(skills.retriever).__name__} learns from rewards, which rollouts.skills does not pass on; take "
                "another retriever, or give this one to SDAR's model.skills"
            )
        if skills is not None and (skills.place, skills.every_turn) != ("user_turn", False):
            raise ValueError(
                f"rollouts.skills has place {skills.place} and every_turn {skills.every_turn}; expected user_turn and "
                "false: other values are for a teacher (model.skills)"
            )
        if getattr(protocol, "per_turn_prompts", False):
            warn_of_early_ends(self.budgets)
        self.skills = skills
        self.agent_loop: AgentLoop | ProgramLoop
        if program is not None:
            check_program(type(protocol), environment, self.sampler)
            assert isinstance(protocol, ProgramProtocol), "it was checked"
            refused = {"skills": skills is not None, "entropy_tokens": entropy_tokens, "limit_eos": limit_eos}
            if names := [name for name, given in refused.items() if given]:
                raise ValueError(f"rollouts has {', '.join(names)}, which a program does not take; leave it out")
            self.agent_loop = ProgramLoop(engine, protocol, program, self.budgets, scored=reward is not None)
        elif isinstance(engine, ServedModel):
            raise ValueError(f"{PROGRAMS_ONLY}; give rollouts.program, or another engine")
        elif environment is None or isinstance(protocol, ProgramProtocol):
            raise ValueError("rollouts has no program; give one, or an environment and a protocol that writes prompts")
        else:
            check_tools(environment, protocol.tools, type(protocol).__name__)
            settings = (self.budgets, entropy_tokens, top_logprobs, skills, None if guide is None else guide.engine)
            self.agent_loop = AgentLoop(engine, protocol, environment, *settings)
        self._test_loop = self.agent_loop
        if test_limits is not None:
            self._test_loop = self.agent_loop.with_budgets(test_limits.applied(self.budgets))
        self._policy_version = 0
        self._thread: EventLoopThread | None = None
        self._lock = threading.Lock()

    @property
    def policy_version(self) -> int:
        """Version number of the engine's current weights. 0 before the first ``load_weights`` and after ``close``,
        because the engine then starts with its folder's weights."""
        return self._policy_version

    @property
    def running(self) -> bool:
        """Whether the rollout system is started and not closed."""
        return self._thread is not None

    @property
    def needs_answers(self) -> bool:
        """Whether tasks need gold answers. They do not if the environment or the program scores its episodes itself."""
        return self.reward is not None if self.environment is None else not scores_itself(self.environment)

    def first_prompts(self, *, inject_skills: bool = True, test: bool = False) -> FirstPrompts | None:
        """Return the object that writes the first prompt of each trajectory, or None if a program does;
        ``inject_skills`` and ``test`` as in ``rollout``."""
        prompts = (self._test_loop if test else self.agent_loop).first_prompts
        return prompts if inject_skills or prompts is None else dataclasses.replace(prompts, skills=None)

    @property
    def failures(self) -> tuple[str, ...]:
        """Error messages of the latest infrastructure failures (engine, tool or reward service), oldest first."""
        return tuple(self.agent_loop.failures)

    def start(self) -> None:
        """Start the event loop, tools, reward and engine, in this order. Idempotent. Raises their errors."""
        with self._lock:
            first = self._thread is None
            if first:
                self._thread = EventLoopThread("rollout")
                self._slots, self._admission = Slots(self.concurrency), Admission()
            self._submit(self._start()).result()
        if first:
            self.sleep()  # the trainer's models are not loaded yet

    def rollout(
        self,
        tasks: Sequence[Task],
        *,
        n: int = 1,
        sampling: SamplingParams,
        seed: int,
        mode: PromptMode = PromptMode.AGENT,
        on_progress: Callable[[int, int], None] | None = None,
        sampler: Sampler | None = None,
        inject_skills: bool = True,
        test: bool = False,
        guided: float = 0.0,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Roll out ``n`` trajectories per task. Returns them ordered by task, then index.

        The same seed and weights give the same trajectories: each request's seed is derived from (seed, group, the
        trajectory's key, turn). If latencies change, only a branching sampler (``rollout.samplers.branching``) may
        number trajectories differently and make other forks. A task's group is its id; a second occurrence in ``tasks``
        is the group "id#2". Trajectories that a service failed, or whose reward failed, have the stop reason
        INFRASTRUCTURE and no reward.

        Args:
            on_progress: called in this thread with (finished, expected) after each trajectory.
            sampler: replaces the system's sampler (evaluations take independent trajectories).
            inject_skills: add the system's skills, if any, to the prompts.
            test: use the limits of evaluations (``test_limits``).
            guided: probability that the guide plays a turn.
            on_finished: called in the system's event loop with each trajectory that has just finished.
        """
        order = {group: position for position, group in enumerate(group_names(tasks))}
        finished: list[Trajectory] = []
        how = {"mode": mode, "sampler": sampler, "inject_skills": inject_skills, "test": test, "guided": guided}
        how["on_finished"] = on_finished
        stream = self.stream(tasks, n=n, sampling=sampling, seed=seed, **how)
        with closing(stream):
            for trajectory in stream:
                finished.append(trajectory)
                if on_progress is not None:
                    on_progress(len(finished), n * len(tasks))
        return sorted(finished, key=lambda t: (order[t.group], t.index))

    def stream(
        self,
        tasks: Sequence[Task],
        *,
        n: int = 1,
        sampling: SamplingParams,
        seed: int,
        mode: PromptMode = PromptMode.AGENT,
        sampler: Sampler | None = None,
        inject_skills: bool = True,
        test: bool = False,
        guided: float = 0.0,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> Generator[Trajectory, None, None]:
        """Yield each trajectory of a ``rollout`` as soon as it is finished.

        Closing the iterator, or an exception in the caller's loop, cancels the running trajectories."""
        if n < 1:
            raise ValueError(f"n is {n}; expected at least one trajectory per task")
        self._start_awake()
        finished: queue.SimpleQueue[Trajectory | None] = queue.SimpleQueue()
        if sampler is None:
            sampler = self.sampler if mode is PromptMode.AGENT else IndependentSampler()
        request = Request(seed, sampling, mode, inject_skills=inject_skills, guided=guided)
        loop = self._test_loop if test else self.agent_loop
        work = self._roll_out(tasks, n, request, sampler, _both(on_finished, finished.put), loop=loop)
        task = self._submit(_launch(work, on_done=lambda: finished.put(None))).result()
        try:
            while (trajectory := finished.get()) is not None:
                yield trajectory
        finally:
            if not task.done():
                self._running_thread.call(task.cancel)
                while finished.get() is not None:  # wait until every trajectory has released engine and tools
                    pass
        _raise_first_error(task)

    def background(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the system's event loop and return its future. The coroutine awaits ``roll_out``.

        Cancelling the future, or ``close``, cancels the coroutine."""
        self.start()
        return self._submit(work)

    async def roll_out(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        sampling: SamplingParams,
        seed: int,
        batch: int,
        guided: float = 0.0,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Roll out ``n`` trajectories per task. Returns them ordered by task, then index. Awaited in the system's event
        loop (see ``background``).

        Args:
            batch: number of the batch, from 0. Lower numbers go first.
            guided, on_finished: see ``rollout``.
        """
        order = {group: position for position, group in enumerate(group_names(tasks))}
        finished: list[Trajectory] = []
        request, deliver = Request(seed, sampling, guided=guided), _both(on_finished, finished.append)
        try:
            await self._roll_out(tasks, n, request, self.sampler, deliver, batch)
        except BaseExceptionGroup as error:
            raise _first(error) from None
        return sorted(finished, key=lambda t: (order[t.group], t.index))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, checksum: bool = False) -> None:
        """Replace the engine's weights. Trajectories in flight finish first, or continue with the new weights (option
        ``in_flight_updates``).

        With several ranks a collective: it returns when all engines, or the shared servers, hold the weights.

        Args:
            tensors: consumed in this thread, one at a time, and to the end even if the engine refuses one: gathering
                sharded weights is collective, and other ranks wait for this rank.
            checksum: the engine compares each tensor with a checksum of the sender.

        Raises ValueError if a name, a shape or a checksum does not fit; the engine then keeps its weights.
        """
        self.start()
        if self.in_flight_updates:
            push(self.engine, self._submit, tensors, version, checksum, between_steps=True)
        else:
            with self._nothing_in_flight():
                push(self.engine, self._submit, tensors, version, checksum)
        self._policy_version = version

    def probe(self, text: str, max_new_tokens: int) -> tuple[list[int], dict[str, Generation]]:
        """Generate greedily from ``text`` with the engine, without a chat template. Returns the ids of ``text``, and a
        generation for each server (or for "the engine"). Raises InfrastructureError if one does not answer."""
        self._start_awake()
        ids = list(self.protocol.tokenizer.encode(text))
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        ask_all = getattr(self.engine, "probe", None)
        if ask_all is not None:
            return ids, self._submit(ask_all(ids, sampling)).result()
        return ids, {"the engine": self._submit(self.engine.generate(ids, sampling)).result()}

    def sleep(self) -> None:
        """Free the engine's GPU memory until the next weight push or rollout; no effect without ``sleep_mode``. Raises
        RuntimeError if trajectories are in flight."""
        if self._sleeper is not None:
            self._submit(self._sleeper.sleep()).result()

    def _start_awake(self) -> None:
        """Start the rollout system and wake the engine up. The engine still has the weights of the last push."""
        self.start()
        if self._sleeper is not None:
            self._submit(self._sleeper.wake_up()).result()

    @property
    def shares_engine(self) -> bool:
        """Whether other ranks sample from the same servers."""
        return is_shared(self.engine)

    def close(self) -> None:
        """Close tools, reward and engine, and end the background thread. Idempotent. A later use starts all again, with
        the engine's first weights (see ``policy_version``)."""
        with self._lock:
            if self._thread is None:
                return
            try:
                self._submit(self._close()).result()
            finally:
                self._thread.stop()
                self._thread = None
                self._policy_version = 0

    async def _start(self) -> None:
        if self.skills is not None:
            self.skills.check(token_counter(self.protocol.tokenizer), control_tokens(self.protocol.tokenizer))
        for part in (self.environment, self.program, self.reward, self.agent_loop):
            if isinstance(part, Startable):
                await part.start()
        await self.engine.start()

    @contextmanager
    def _nothing_in_flight(self) -> Iterator[None]:
        """Context manager that waits until all running groups are done, and lets no group begin inside the block."""
        thread, update, began = self._running_thread, object(), time.monotonic()
        try:
            thread.call(lambda: self._admission.close(update))
            self._submit(self._admission.idle()).result()
            self.waited_s += time.monotonic() - began
            yield
        finally:  # also after Ctrl-C
            thread.call(lambda: self._admission.reopen(update))

    async def _close(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        async with AsyncExitStack() as stack:  # close each, even if closing another raises
            stack.push_async_callback(self.engine.close)
            if self.guide is not None:
                stack.push_async_callback(self.guide.engine.close)
            if isinstance(self.reward, AsyncReward):
                stack.push_async_callback(self.reward.close)
            for part in (self.environment, self.program):
                if part is not None:
                    stack.push_async_callback(part.close)
            if isinstance(self.agent_loop, ProgramLoop):
                stack.push_async_callback(self.agent_loop.close)

    @property
    def _running_thread(self) -> EventLoopThread:
        if self._thread is None:
            raise RuntimeError("the rollout system is closed")
        return self._thread

    def _submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return self._running_thread.submit(coroutine)

    async def _roll_out(
        self,
        tasks: Sequence[Task],
        n: int,
        request: Request,
        sampler: Sampler,
        deliver: Callable[[Trajectory], None],
        batch: int = -1,
        loop: AgentLoop | ProgramLoop | None = None,
    ) -> None:
        """Roll out ``n`` trajectories per task and pass each to ``deliver`` once it is finished. ``batch``: lower
        numbers go first; -1 is for ``stream``, whose caller waits."""
        if request.guided > 0:
            if self.guide is None:
                raise ValueError(f"guided is {request.guided}, but the rollout system has no guide; give it one, or 0")
            await self.guide.engine.start()
        scorer = None if self.reward is None else Scorer(self.reward)
        chosen = loop or self.agent_loop

        async def sample(position: int, task: Task, group: str) -> None:
            slots, priority = self._slots, (batch, position)
            with self._admission.group() as admission:
                one = PromptGroup(chosen, slots, scorer, task, group, priority, request, deliver, admission)
                made = await sampler.sample(one, n)
            if [t.index for t in made] != list(range(n)):
                raise RuntimeError(
                    f"{type(sampler).__name__} made members {[t.index for t in made]} of group {group}; expected "
                    f"exactly 0 to {n - 1}"
                )

        async with asyncio.TaskGroup() as running:
            for position, (task, group) in enumerate(zip(tasks, group_names(tasks), strict=True)):
                running.create_task(sample(position, task, group))


def _both(
    first: Callable[[Trajectory], None] | None, second: Callable[[Trajectory], None]
) -> Callable[[Trajectory], None]:
    """Return a function that passes a trajectory to both."""

    def deliver(trajectory: Trajectory) -> None:
        if first is not None:
            first(trajectory)
        second(trajectory)

    return deliver


def check_guide(sampler: Sampler | None, program: Program | None, sleep_mode: bool) -> None:
    """Raise ValueError for options of a rollout system that a guide does not go with."""
    taken = {
        "program": program is not None,
        "sleep_mode": sleep_mode,
        "a sampler that forks": sampler is not None and getattr(sampler, "forks", True),
    }
    if names := [name for name, given in taken.items() if given]:
        raise ValueError(
            f"rollouts has a guide and {', '.join(names)}; a guide plays turns of independent trajectories, with an "
            "engine that never sleeps: leave one of them out"
        )


def check_sleep(engine: Any, in_flight_updates: bool, max_off_policy_iterations: int = 0) -> None:
    """Raise ValueError unless an engine can free its memory (sleep) and is idle while the trainer trains. ``engine``
    may be a class."""
    cure = "take sleep_mode: false"
    if max_off_policy_iterations or in_flight_updates:
        ahead = f"data.max_off_policy_iterations is {max_off_policy_iterations}"
        found = ahead if max_off_policy_iterations else "in_flight_updates is true"
        raise ValueError(f"sleep_mode is true, but {found}: the engine generates while the trainer trains; {cure}")
    shared = getattr(engine, "shared", False)
    if shared or not hasattr(engine, "sleep"):
        name = engine.__name__ if isinstance(engine, type) else type(engine).__name__
        why = "serves several ranks" if shared else "has no method sleep"
        raise ValueError(f"sleep_mode is true, but {name} {why}: expected an engine that one rank owns; {cure}")


def warn_of_early_ends(budgets: Budgets) -> None:
    wanted = budgets.max_turns * budgets.max_turn_tokens
    if budgets.max_response_tokens < wanted:
        logger.warning(
            "max_response_tokens is %d over all turns of an episode, of which %d may have %d tokens each: episodes of "
            "long turns end early; for none to do so take %d",
            budgets.max_response_tokens,
            budgets.max_turns,
            budgets.max_turn_tokens,
            wanted,
        )


async def _launch(work: Coroutine[Any, Any, None], on_done: Callable[[], None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda _: on_done())
    return task


def _raise_first_error(task: asyncio.Task[None]) -> None:
    """Raise the error that ended an asyncio task, if any, without the exception groups around it."""
    if task.cancelled():
        raise RuntimeError("the rollout system was closed while trajectories were in flight")
    if (error := task.exception()) is not None:
        raise _first(error)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
