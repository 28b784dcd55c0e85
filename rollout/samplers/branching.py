"""ARPO's entropy-based branching (arXiv 2507.19849) and AEPO's changes to it: a part of a group starts from the
prompt, the others fork from running trajectories where a tool result has raised the policy's entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from common.ranges import FiniteFloat, PositiveInt, TopLogprobs, UnitInterval
from rollout.engines.base import Generation
from rollout.samplers.base import GroupRunner, Hooks, RunningView
from rollout.samplers.entropy import first_tokens_entropy, released_entropy
from rollout.samplers.independent import run_independent
from rollout.samplers.tree import FreeTree, LockStepTree
from rollout.trajectory import Trajectory

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
    ``rollout.samplers.tree.LockStepTree`` for what is not followed.

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
