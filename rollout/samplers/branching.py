"""ARPO's entropy-based branching (arXiv 2507.19849) and AEPO's changes to it: a part of a group starts from the
prompt, the others fork from running trajectories where a tool result has raised the policy's entropy."""

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
    """``initial_rollouts`` trajectories from the prompt; the other members of the group fork from running ones.

    A trajectory forks with probability ``clip(branch_probability + entropy_weight * dH, 0, 1)``, where dH is the
    entropy after a tool result less that of the trajectory's beginning. Members that no fork has claimed start from
    the prompt. Exactly n trajectories per prompt in every case; with ``initial_rollouts`` = n they are those of
    ``IndependentSampler``.

    ``fixed``: entropy is that of the first ``first_tokens`` tokens after the result, against those of the trajectory's
    own first turn, which a fork takes over with all it inherits. A fork shares its source's tokens up to and including
    the result; the source keeps the tokens that were looked at. Nothing waits: a trajectory decides when its tool
    returns, and missing members start, all at once, as soon as no running trajectory of the prompt can fork any more.
    Decisions and seeds depend on the group's seed, the source and the turn alone. What depends on the order of
    arrival: the numbering of the forks, and, if more forks are wanted than the group has room for, who gets them; and
    then what is sampled besides, as a turn that is looked at takes two requests and any other one.

    ``lock_step``: entropy, formula and rounds of the released code, within one prompt's group, with a seeded random
    generator; deterministic. It is the nearest to the released sampler, and not the same: see
    ``LockStepTree`` for what is not followed.

    The entropy is scaled as in the released code, ``first_tokens`` times the mean over the tokens divided by ln V, so
    that the published weight fits; it is not confined to [0, 1].

    Args:
        initial_rollouts: trajectories that start from the prompt at once (N); all n where n is smaller.
        beam_size: a trajectory forks at most ``beam_size - 1`` times at one result (Z + 1).
        branch_probability: probability of a fork where the entropy has not changed (tau).
        entropy_weight: what a change of entropy by 1 adds to it (w). 0: forks at random.
        first_tokens: tokens over which entropy is taken (k).
        top_logprobs: likeliest tokens that the engine is asked for at each of them.
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
        """A group of ``n`` of which ``roots`` start from the prompt at once; the first of these may be ``done``."""
        if roots >= n or self.beam_size == 1:
            return [*done, *await run_independent(group, range(len(done), n))]
        tree = LockStepTree if self.variant == "lock_step" else FreeTree
        return await tree(self, group, n).sample(roots, done)

    def probability(self, change: float, streak: int = 0) -> float:
        """Of a fork where the entropy has risen by ``change``. ``streak``: forks before it in a row (``AEPOSampler``).

        The released code forks where clip(U - w dH, 0, 1) <= tau with a uniform U, which has this probability.
        """
        return min(max(self.branch_probability + self.entropy_weight * change, 0.0), 1.0)

    def entropy(self, generation: Generation, vocabulary: int) -> float:
        """How uncertain the policy was at the beginning of ``generation``, in the scale of the released code."""
        if self.variant == "lock_step":
            return released_entropy(generation, self.first_tokens, vocabulary)
        return self.scale(vocabulary) * (first_tokens_entropy(generation.top_logprobs, self.first_tokens) or 0.0)

    def scale(self, vocabulary: int) -> float:
        """From a mean over tokens in nats (``Turn.entropy``) to the scale of the released code."""
        return self.first_tokens / math.log(vocabulary)


class AEPOSampler(BranchingSampler):
    """AEPO's changes to ``BranchingSampler`` (arXiv 2510.14545): how many trajectories start from the prompt follows
    from a probe, and forks in a row become less likely, so that they do not all fall on a few trajectories.

    Pre-monitoring: with H_root the entropy of the probe's first turn, H_tool the mean of its turns after tool results
    (H_root where there are none), and s = sigmoid(monitor_weight * (H_root - H_tool)), m of the n trajectories start
    from the prompt and the others fork.

    ``fixed``: m = n s, rounded, from 1 to n; the probe is the first of the m, and may fork at its results once m is
    known. A fork's probability is ARPO's times max(0, 1 - consecutive_penalty * l), where l counts the forks at the
    results just before on the trajectory's own path, its source's included.

    ``lock_step``: m = int(n s) + 1, from 1 to n; the probe is sampled besides the n and thrown away, and its H_root
    is that of its first turn (the released code draws 50 tokens anew). A trajectory forks where
    clip((U + w dH) f, 0, 1) >= tau with a uniform U, that is with probability 1 - tau / f + w dH, where
    f = max(0, 1 - consecutive_penalty * l) and l counts the earlier rounds that added forks or new roots; a round
    that adds none leaves it. The released scripts switch pre-monitoring off.

    No metric holds the forks decided on at the finished probe (``fixed``), nor the probe's own calls and tokens
    (``lock_step``).

    Args:
        initial_rollouts: as in ``BranchingSampler``, whose other arguments it takes too; without pre-monitoring only.
        pre_monitoring: choose the number of trajectories from the prompt by a probe.
        monitor_weight: beta of the sigmoid.
        consecutive_penalty: gamma, what each fork in a row takes off.

    Raises:
        ValueError: a number is impossible.
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
        """m: how many of ``n`` trajectories start from the prompt, by the probe's entropies."""
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
    """One prompt's group, its members numbered in the order in which they are started. Single use."""

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        self.rule, self.group, self.n = rule, group, n
        self.hooks = self.make_hooks()
        self._members: list[Trajectory | None] = []  # None: in flight
        self._roots = 0
        self._active: set[int] = set()  # members that may still fork

    def make_hooks(self) -> Hooks:
        raise NotImplementedError

    def ended(self, index: int) -> None:
        """Member ``index`` ends."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        return self.n - len(self._members)

    async def sample(self, roots: int, done: Sequence[Trajectory] = ()) -> list[Trajectory]:
        """All ``n`` trajectories, of which ``roots`` start at once; the first of these may be ``done`` already."""
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
        """A member that had ended before the tree began may fork as well."""

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
    """The variant ``fixed``: every trajectory decides when its own tool returns; nothing waits.

    A turn's first tokens are a request of their own only where a decision hangs on their entropy: not in the first
    turn, whose entropy is wanted later, nor where the group is full or the trajectory cannot fork, nor where the draw
    is above, or below, every probability that an entropy could give.
    """

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        super().__init__(rule, group, n)
        self._streaks: dict[int | str, int] = {}  # forks in a row at the latest results of a lineage
        self._decided: dict[int, int] = {}  # by member whose draw alone has decided: the streak before

    def make_hooks(self) -> Hooks:
        return Hooks(self.rule.first_tokens, self.rule.top_logprobs, self._look, self._see)

    def _look(self, state: RunningView) -> EntropyProbe:
        turn, at, key = len(state.turns), len(state.response_ids), state.key
        look = EntropyProbe.NONE
        if self.room and not turn:
            look = EntropyProbe.WITH_TURN
        elif self._may_fork(state, turn, at):
            streak, highest = self._streaks.get(key, 0), math.log(self.group.vocabulary)
            bounds = [self._probability(state, entropy, streak) for entropy in (0.0, highest)]
            if any(min(bounds) <= draw < max(bounds) for draw in self._draws(key, turn)):
                return EntropyProbe.BEFORE_THE_REST
            self._fork(state, turn, at, key, bounds[0])
            self._decided[state.index] = streak
            look = EntropyProbe.WITH_TURN  # so that the probability is recorded
        if state.last_turn:
            self.ended(state.index)
        return look

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
        """Member ``index`` can fork no more. If no other can, the missing members start from the prompt."""
        self._active.discard(index)
        if not self._active:
            while self.room:
                self.start_root()

    def _may_fork(self, source: TrajectoryPrefix, turn: int, at: int) -> bool:
        """Whether a decision is taken where turn ``turn`` of ``source`` begins, at response offset ``at``."""
        followed_result = any(call.turn == turn - 1 and call.executed for call in source.calls)
        forked_here = source.fork is not None and source.fork.at == at
        compared = turn > 0 and source.turns[0].entropy is not None
        return self.room > 0 and followed_result and not forked_here and compared

    def _consider(self, source: TrajectoryPrefix, turn: int, at: int, key: int | str, entropy: float) -> float | None:
        """Fork ``source`` where its turn ``turn`` begins, or not. Returns the probability; None: no decision."""
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
    """The variant ``lock_step``: rounds of one turn each, within one prompt's group, in the order of the released
    vllm_rollout_with_tools.py (docs/papers/arpo.md 1.4).

    Not followed: the released code takes its rounds over the whole batch of a worker, and keeps the first entropies in
    a store by row of that batch which is never cleared. From the second batch on a trajectory is compared with another
    prompt's, of another step: measured side by side, forks had probability 0.13 on average there, and 0.50 here. AEPO's
    penalty counts the rounds that added trajectories; a round in which only other prompts of the batch get some starts
    the count again there. A sampler sees one group, so that none of this can be had here.
    """

    def __init__(self, rule: BranchingSampler, group: GroupRunner, n: int) -> None:
        super().__init__(rule, group, n)
        self._draw = random.Random(derive_seed(group.seed, "fork"))
        self._first: dict[int, float] = {}  # entropy of each member's own first segment
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
        """When the last trajectory of the round has arrived: forks, in order of index; else one new root; go on."""
        if len(self._waiting) < len(self._active):
            return
        before = self.room
        arrived = sorted(self._waiting.items())
        self._waiting = {}
        for index, (state, released) in arrived:
            if self.room and state.turns[-1].action.kind is ActionKind.CALL:  # else the model was corrected
                self._consider(state, self._latest[index] - self._first[index])
            released.set_result(None)
        if not arrived and self.room:
            self.start_root()
        self._streak += self.room < before  # the released code resets it only where another prompt's group has grown

    def _consider(self, state: RunningView, change: float) -> None:
        probability = self.rule.probability(change, self._streak)
        state.branch_probability = probability
        turn, at = len(state.turns), len(state.response_ids)
        for number in range(min(self.rule.beam_size - 1, self.room)):
            if self._draw.random() < probability:
                self.start_fork(state, at, f"{state.key}/{turn}.{number}")
