"""ARPO's entropy-based branching (arXiv 2507.19849) and AEPO's changes to it (arXiv 2510.14545).

A part of a group starts from the prompt. The others fork from running trajectories where a tool result has raised the
policy's entropy. `BranchingSampler` and `AEPOSampler` compute probabilities; the trees below decide and start forks.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Literal

from common.ranges import FiniteFloat, PositiveInt, TopLogprobs, UnitInterval
from common.seeds import derive_seed
from rollout.engines.base import Generation
from rollout.samplers.base import (
    EntropyProbe,
    GroupRunner,
    Hooks,
    RunningView,
    first_tokens_entropy,
    released_entropy,
    run_independent,
)
from rollout.trajectory import ActionKind, Trajectory, TrajectoryPrefix

Variant = Literal["fixed", "lock_step"]


class BranchingSampler:
    """Starts ``initial_rollouts`` trajectories from the prompt, and forks the others from running trajectories (ARPO).

    A trajectory forks with probability ``clip(branch_probability + entropy_weight * dH, 0, 1)``, where dH is the
    entropy after a tool result minus the entropy at the trajectory's start. Members that no fork has claimed start from
    the prompt. Every prompt gets exactly n trajectories. With ``initial_rollouts`` = n the sampler equals
    ``IndependentSampler``.

    ``fixed``: dH compares the first ``first_tokens`` tokens after the result with those of the trajectory's first turn
    (which a fork inherits). A fork shares its source's tokens up to and including the result; the source keeps the
    probed tokens. No trajectory waits for another: each one decides when its tool returns. The missing members start
    together as soon as no running trajectory of the prompt can fork any more.
    Decisions and seeds depend only on the group's seed, the source and the turn. The order of arrival decides how forks
    are numbered, and which forks are made if the group has too little room for all. It may then also change sampled
    tokens, because a probed turn takes two requests and any other turn takes one.

    ``lock_step``: entropy, formula and rounds of the released code, within one prompt's group and with a seeded random
    generator. It is deterministic, and the variant closest to the released sampler; ``LockStepTree`` lists the
    differences.

    The entropy is scaled as in the released code, so that the published weight fits: ``first_tokens`` times the mean
    over the tokens, divided by ln V. It may exceed 1.

    Args:
        initial_rollouts: trajectories that start from the prompt at once (N); at most n.
        beam_size: a trajectory forks at most ``beam_size - 1`` times at one result (Z + 1).
        branch_probability: probability of a fork if the entropy has not changed (tau).
        entropy_weight: added to the probability for a change of entropy by 1 (w). 0: forks at random.
        first_tokens: number of tokens that the entropy covers (k).
        top_logprobs: most likely tokens that the engine returns at each of them.
        variant: ``fixed`` or ``lock_step``.
    """

    forks = True

    def __init__(
        self,
        initial_rollouts: PositiveInt,
        beam_size: PositiveInt = 2,
        branch_probability: UnitInterval = 0.5,
        entropy_weight: FiniteFloat = 0.2,
        first_tokens: PositiveInt = 20,
        top_logprobs: TopLogprobs = 10,
        variant: Variant = "fixed",
    ) -> None:
        self.initial_rollouts, self.beam_size = initial_rollouts, beam_size
        self.branch_probability, self.entropy_weight = branch_probability, entropy_weight
        self.first_tokens, self.top_logprobs, self.variant = first_tokens, top_logprobs, variant

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        return await self.sample_tree(group, n, min(self.initial_rollouts, n))

    async def sample_tree(
        self, group: GroupRunner, n: int, roots: int, done: Sequence[Trajectory] = ()
    ) -> list[Trajectory]:
        """Return ``n`` trajectories, of which ``roots`` start from the prompt at once, and the others fork. ``done``:
        first roots that have finished already."""
        if roots >= n or self.beam_size == 1:
            return [*done, *await run_independent(group, range(len(done), n))]
        tree = LockStepTree if self.variant == "lock_step" else FreeTree
        return await tree(self, group, n).sample(roots, done)

    def probability(self, change: float, streak: int = 0) -> float:
        """Return the probability of a fork after a ``change`` of entropy.

        The released code forks if clip(U - w dH, 0, 1) <= tau with a uniform U, which has this probability.

        Args:
            streak: number of forks in a row before this one (used by ``AEPOSampler``).
        """
        return min(max(self.branch_probability + self.entropy_weight * change, 0.0), 1.0)

    def entropy(self, generation: Generation, vocabulary: int) -> float:
        """Return the entropy of the first tokens of ``generation``, in the scale of ARPO's released code."""
        if self.variant == "lock_step":
            return released_entropy(generation, self.first_tokens, vocabulary)
        return self.scale(vocabulary) * (first_tokens_entropy(generation.top_logprobs, self.first_tokens) or 0.0)

    def scale(self, vocabulary: int) -> float:
        """Return the factor that converts a mean entropy in nats (``Turn.entropy``) to the scale of ARPO's released
        code."""
        return self.first_tokens / math.log(vocabulary)


class AEPOSampler(BranchingSampler):
    """Adds AEPO's pre-monitoring and its penalty on consecutive forks to ``BranchingSampler`` (arXiv 2510.14545).

    A probe decides how many trajectories start from the prompt. Forks in a row become less likely, so that they spread
    over the trajectories.

    Pre-monitoring: H_root is the entropy of the probe's first turn, H_tool the mean over its turns after tool results
    (H_root without such turns), and s = sigmoid(monitor_weight * (H_root - H_tool)). Of the n trajectories m start from
    the prompt, and the others fork.

    ``fixed``: m = n s, rounded, from 1 to n. The probe is the first of the m, and may fork at its results once m is
    known. A fork's probability is ARPO's times max(0, 1 - consecutive_penalty * l), where l counts the forks at the
    preceding results on the trajectory's own path, including its source's.

    ``lock_step``: m = int(n s) + 1, from 1 to n. The probe is sampled in addition to the n and discarded; H_root is the
    entropy of its first turn (the released code samples another 50 tokens). A trajectory forks if
    clip((U + w dH) f, 0, 1) >= tau with a uniform U, that is with probability 1 - tau / f + w dH, where
    f = max(0, 1 - consecutive_penalty * l) and l counts the earlier rounds that added forks or new roots. A round
    that adds none does not change l. The released scripts switch pre-monitoring off.

    Metrics do not include the forks at the finished probe (``fixed``) and the probe's own calls and tokens
    (``lock_step``).

    Args:
        initial_rollouts: as in ``BranchingSampler``; used only without pre-monitoring. Other arguments are the same.
        pre_monitoring: let a probe choose the number of trajectories from the prompt.
        monitor_weight: beta of the sigmoid.
        consecutive_penalty: gamma, the factor that each fork in a row subtracts.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        initial_rollouts: PositiveInt,
        pre_monitoring: bool = True,
        monitor_weight: FiniteFloat = 0.5,
        consecutive_penalty: UnitInterval = 0.05,
        **kwargs,
    ) -> None:
        super().__init__(initial_rollouts, **kwargs)
        self.pre_monitoring, self.monitor_weight = pre_monitoring, monitor_weight
        self.consecutive_penalty = consecutive_penalty

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        if not self.pre_monitoring or n == 1 or self.beam_size == 1:
            return await super().sample(group, n)
        after_prompt: list[float] = []
        after_results: list[float] = []

        async def measure(state: RunningView, generation: Generation) -> None:
            turn = len(state.turns) - 1
            entropy = self.entropy(generation, group.vocabulary)
            if turn == 0:
                after_prompt.append(entropy)
            elif any(call.turn == turn - 1 and call.executed for call in state.calls):
                after_results.append(entropy)

        hooks = Hooks(self.first_tokens, self.top_logprobs, on_turn=measure)
        if self.variant == "lock_step":
            await group.run(n, key="probe", hooks=hooks, counts=False)
            return await self.sample_tree(group, n, self.roots(n, after_prompt, after_results))
        probe = await group.run(0, hooks=hooks)
        return await self.sample_tree(group, n, self.roots(n, after_prompt, after_results), [probe])

    def roots(self, n: int, after_prompt: Sequence[float], after_results: Sequence[float]) -> int:
        """Return how many of a group's n trajectories start from the prompt; the others fork. It depends on the
        entropies that the first trajectory (the probe) had after the prompt and after results."""
        difference = 0.0
        if after_prompt and after_results:
            difference = after_prompt[0] - sum(after_results) / len(after_results)
        share = 0.5 * (1.0 + math.tanh(0.5 * self.monitor_weight * difference))  # the sigmoid, without overflow
        count = int(n * share) + 1 if self.variant == "lock_step" else round(n * share)
        return min(max(count, 1), n)

    def probability(self, change: float, streak: int = 0) -> float:
        factor = max(0.0, 1.0 - self.consecutive_penalty * streak)
        if self.variant == "fixed":
            return super().probability(change) * factor
        if self.branch_probability == 0:
            return 1.0
        if factor == 0:
            return 0.0
        return min(max(1.0 - self.branch_probability / factor + self.entropy_weight * change, 0.0), 1.0)


class Tree:
    """Grows the group of one prompt: trajectories that start from the prompt, and their forks. Members are numbered in
    the order of their start. Use it once."""

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        self.rule, self.group, self.n = rule, group, n
        self.hooks = self.make_hooks()
        self._members: list[Trajectory | None] = []  # None: in flight
        self._roots = 0
        self._active: set[int] = set()  # members that may still fork

    def make_hooks(self) -> Hooks:
        raise NotImplementedError

    def ended(self, index: int) -> None:
        """Update the tree after trajectory ``index`` has ended."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        return self.n - len(self._members)

    async def sample(self, roots: int, done: Sequence[Trajectory] = ()) -> list[Trajectory]:
        """Return all ``n`` trajectories of the group. ``roots`` start from the prompt at once; the first may be
        ``done`` already."""
        self._members.extend(done)
        self._roots = len(done)
        async with asyncio.TaskGroup() as self._tasks:  # one that fails cancels the others
            for _ in range(roots - len(done)):
                self.start_root()
            for index, member in enumerate(done):
                self.consider_ended(member)
                self.ended(index)
        return [member for member in self._members if member is not None]

    def consider_ended(self, member: Trajectory) -> None:
        """Decide at random about forks of a trajectory that ended before the tree began."""

    def start_root(self) -> None:
        self._start(self._roots)
        self._roots += 1

    def start_fork(self, source: TrajectoryPrefix, at: int, key: str) -> None:
        self._start(key, source, at)

    def _start(self, key: int | str, source: TrajectoryPrefix | None = None, at: int = 0) -> None:
        index = len(self._members)
        self._members.append(None)
        self._active.add(index)
        self._tasks.create_task(self._run(index, key, source, at))

    async def _run(self, index: int, key: int | str, source: TrajectoryPrefix | None, at: int) -> None:
        self._members[index] = await self.group.run(index, start=source, at=at, key=key, hooks=self.hooks)
        self.ended(index)


class FreeTree(Tree):
    """Branching variant ``fixed``: each trajectory decides about forks when its own tool returns, without waiting for
    others.

    A turn's first tokens take a separate request only if a decision depends on their entropy. They do not in the first
    turn, whose entropy is used later, in a full group, for a trajectory that cannot fork, and if the random draw is
    above or below every probability that an entropy could give.
    """

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        super().__init__(rule, group, n)
        self._streaks: dict[int | str, int] = {}  # by key: forks in a row at its latest results
        self._decided: dict[int, int] = {}  # members whose draw alone decided -> the streak before

    def make_hooks(self) -> Hooks:
        return Hooks(self.rule.first_tokens, self.rule.top_logprobs, self._probe, self._see)

    def _probe(self, state: RunningView) -> EntropyProbe:
        turn, at, key = len(state.turns), len(state.response_ids), state.key
        probe = EntropyProbe.NONE
        if self.room and not turn:
            probe = EntropyProbe.WITH_TURN
        elif self._may_fork(state, turn, at):
            streak, highest = self._streaks.get(key, 0), math.log(self.group.vocabulary)
            bounds = [self._probability(state, entropy, streak) for entropy in (0.0, highest)]
            if any(min(bounds) <= draw < max(bounds) for draw in self._draws(key, turn)):
                return EntropyProbe.BEFORE_THE_REST
            self._fork(state, turn, at, key, bounds[0])
            self._decided[state.index] = streak
            probe = EntropyProbe.WITH_TURN  # to record the probability
        if state.last_turn:
            self.ended(state.index)
        return probe

    async def _see(self, state: RunningView, first: Generation) -> None:
        if state.entropy is None:
            raise ValueError("the engine returned no top log-probs; branching needs them")
        streak = self._decided.pop(state.index, None)
        if streak is not None:
            state.branch_probability = self._probability(state, state.entropy, streak)
        elif turn := len(state.turns):
            state.branch_probability = self._consider(state, turn, len(state.response_ids), state.key, state.entropy)
            if state.last_turn:
                self.ended(state.index)

    def consider_ended(self, member: Trajectory) -> None:
        for number, turn in enumerate(member.turns):
            if turn.entropy is not None:
                self._consider(member, number, turn.start, member.index, turn.entropy)

    def ended(self, index: int) -> None:
        """Note that trajectory ``index`` cannot fork any more. If none can, start the missing ones from the prompt."""
        self._active.discard(index)
        if not self._active:
            while self.room:
                self.start_root()

    def _may_fork(self, source: TrajectoryPrefix, turn: int, at: int) -> bool:
        """Return whether trajectory ``source`` may fork at the start of ``turn``, at response offset ``at``."""
        followed_result = any(call.turn == turn - 1 and call.executed for call in source.calls)
        forked_here = source.fork is not None and source.fork.at == at
        compared = turn > 0 and source.turns[0].entropy is not None
        return self.room > 0 and followed_result and not forked_here and compared

    def _consider(self, source: TrajectoryPrefix, turn: int, at: int, key: int | str, entropy: float) -> float | None:
        """Fork trajectory ``source`` at the start of ``turn`` with the probability that ``entropy`` gives. Returns the
        probability, or None if it cannot fork."""
        if not self._may_fork(source, turn, at):
            return None
        probability = self._probability(source, entropy, self._streaks.get(key, 0))
        self._fork(source, turn, at, key, probability)
        return probability

    def _probability(self, source: TrajectoryPrefix, entropy: float, streak: int) -> float:
        initial = source.turns[0].entropy
        assert initial is not None  # _may_fork
        return self.rule.probability(self.rule.scale(self.group.vocabulary) * (entropy - initial), streak)

    def _draws(self, key: int | str, turn: int) -> list[float]:
        draw = random.Random(derive_seed(self.group.seed, "fork", key, turn))
        return [draw.random() for _ in range(self.rule.beam_size - 1)]

    def _fork(self, source: TrajectoryPrefix, turn: int, at: int, key: int | str, probability: float) -> None:
        drawn = enumerate(self._draws(key, turn))
        forks = [f"{key}/{turn}.{number}" for number, draw in drawn if draw < probability]
        streak = self._streaks.get(key, 0)
        for fork in forks[: self.room]:
            self._streaks[fork] = streak + 1
            self.start_fork(source, at, fork)
        self._streaks[key] = streak + 1 if forks else 0


class LockStepTree(Tree):
    """Branching variant ``lock_step``: samples one prompt's group in rounds of one turn each. The order is that of the
    released vllm_rollout_with_tools.py (docs/algorithms/arpo.md).

    Two differences follow from the fact that a sampler sees one group. The released code takes its rounds over the
    whole batch of a worker, and stores the first entropies by row of that batch without ever clearing them. From the
    second batch on it compares a trajectory with one of another prompt and iteration: measured side by side, forks had
    probability 0.13 on average there, and 0.50 here. AEPO's penalty counts the rounds that added trajectories; the
    released code resets the count in a round that adds some only to other prompts.
    """

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        super().__init__(rule, group, n)
        self._draw = random.Random(derive_seed(group.seed, "fork"))
        self._first: dict[int, float] = {}  # entropy of each member's first turn
        self._latest: dict[int, float] = {}
        self._waiting: dict[int, tuple[RunningView, asyncio.Future[None]]] = {}
        self._streak = 0  # rounds that added trajectories

    def make_hooks(self) -> Hooks:
        return Hooks(self.rule.first_tokens, self.rule.top_logprobs, on_turn=self._measure, on_result=self._arrive)

    async def _measure(self, state: RunningView, generation: Generation) -> None:
        self._latest[state.index] = self.rule.entropy(generation, self.group.vocabulary)
        self._first.setdefault(state.index, self._latest[state.index])

    async def _arrive(self, state: RunningView) -> None:
        released = asyncio.get_running_loop().create_future()
        self._waiting[state.index] = (state, released)
        self._end_round()
        await released

    def ended(self, index: int) -> None:
        self._active.discard(index)
        self._end_round()

    def _end_round(self) -> None:
        """Once all active trajectories wait, fork them in order of index, and let them continue. If none is active,
        start one from the prompt."""
        if len(self._waiting) < len(self._active):
            return
        before = self.room
        arrived = sorted(self._waiting.items())
        self._waiting = {}
        for index, (state, released) in arrived:
            if self.room and state.turns[-1].action.kind is ActionKind.CALL:  # not invalid
                self._consider(state, self._latest[index] - self._first[index])
            released.set_result(None)
        if not arrived and self.room:
            self.start_root()
        self._streak += self.room < before  # the released code resets it only if another group has grown

    def _consider(self, state: RunningView, change: float) -> None:
        probability = self.rule.probability(change, self._streak)
        state.branch_probability = probability
        turn, at = len(state.turns), len(state.response_ids)
        for number in range(min(self.rule.beam_size - 1, self.room)):
            if self._draw.random() < probability:
                self.start_fork(state, at, f"{state.key}/{turn}.{number}")
