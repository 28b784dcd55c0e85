"""The tree of a prompt's trajectories: forks as tools return, or in the lock-step rounds of ARPO's released code."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.seeds import derive_seed
from rollout.engines.base import Generation
from rollout.samplers.base import GroupRunner, Hooks, Look, RunningView
from rollout.trajectory import ActionKind, Trajectory, TrajectoryPrefix

if TYPE_CHECKING:
    from rollout.samplers.branching import BranchingSampler


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

    def _look(self, state: RunningView) -> Look:
        turn, at, key = len(state.turns), len(state.response_ids), state.key
        look = Look.NONE
        if self.room and not turn:
            look = Look.WITH_TURN
        elif self._may_fork(state, turn, at):
            streak, highest = self._streaks.get(key, 0), math.log(self.group.vocabulary)
            bounds = [self._probability(state, entropy, streak) for entropy in (0.0, highest)]
            if any(min(bounds) <= draw < max(bounds) for draw in self._draws(key, turn)):
                return Look.BEFORE_THE_REST
            self._fork(state, turn, at, key, bounds[0])
            self._decided[state.index] = streak
            look = Look.WITH_TURN  # so that the probability is recorded
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
