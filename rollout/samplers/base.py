"""The sampler seam: which trajectories of a prompt exist, and what a sampler sees of them while they run."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from rollout.engines.base import Generation
from rollout.trajectory import Task, Trajectory, TrajectoryPrefix


class RunningView(TrajectoryPrefix, Protocol):
    """What a sampler sees of a trajectory that is being sampled."""

    branch_probability: float | None  # of the turn being sampled; a sampler sets it, for the record

    @property
    def key(self) -> int | str: ...  # what the seeds of its requests are derived from, with group and turn
    @property
    def entropy(self) -> float | None: ...  # nats, of the turn being sampled; see ``Turn.entropy``
    @property
    def last_turn(self) -> bool: ...  # no result of a call follows the turn that comes next


Hook = Callable[[RunningView, Generation], Awaitable[None]]


class EntropyProbe(Enum):
    """How a sampler wants to see the first tokens of the turn that comes next."""

    NONE = auto()  # not at all: the turn is sampled as without hooks
    WITH_TURN = auto()  # once the whole turn is sampled: in one request, with top log-probs of all its tokens
    BEFORE_THE_REST = auto()  # before the others are sampled: one request more


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a sampler while a trajectory runs. Each is awaited where it is called; what it starts (a fork) must
    not be awaited in it.

    ``look`` is asked before each turn whether and when ``on_first_tokens`` is to be called; by default before the rest
    of the turn is sampled. That costs one more request: the turn's ``first_tokens`` first tokens are sampled by
    themselves, and the turn goes on when the callback has returned. The trajectory that both are given ends where the
    turn begins, so that a fork ``start=state, at=len(state.response_ids)`` shares what was read before, and not these
    tokens.
    """

    first_tokens: int = 0  # over which Turn.entropy is taken
    top_logprobs: int = 0  # asked of the engine: for the first tokens, or where these are no request of their own, all
    look: Callable[[RunningView], EntropyProbe] | None = None
    on_first_tokens: Hook | None = None
    on_turn: Hook | None = None  # after a sampled turn, before its calls run; given the turn's last request
    # After an observation was appended, before the next turn. The trajectory's slot is released until the callback has
    # returned, so that it may wait for other trajectories.
    on_result: Callable[[RunningView], Awaitable[None]] | None = None


NO_HOOKS = Hooks()


class GroupRunner(Protocol):
    """A sampler's handle on the group of one prompt."""

    @property
    def task(self) -> Task: ...
    @property
    def seed(self) -> int: ...  # for the sampler's own decisions; the runs derive theirs by themselves
    @property
    def vocabulary(self) -> int: ...  # tokens that the tokenizer knows: entropies as published divide by its logarithm

    async def run(
        self,
        index: int,
        *,
        start: TrajectoryPrefix | None = None,
        at: int = 0,
        key: int | str | None = None,
        hooks: Hooks = NO_HOOKS,
        counts: bool = True,
    ) -> Trajectory:
        """Roll out member ``index``, scored. With ``start`` it branches off at response offset ``at``.

        Its requests' seeds are derived from ``key`` (by default the index), so that a sampler that numbers its
        members in order of arrival can name them by something else. With ``counts`` False it is neither scored nor
        handed to the caller of the rollout: a probe.
        """
        ...


class Sampler(Protocol):
    """Decides which trajectories of a prompt are rolled out.

    One that never branches off (``GroupRunner.run`` without ``start``) says so by ``forks = False``: only such samplers
    go with protocols that write a new prompt for every turn. One that does not say is taken for one that forks.
    """

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        """Exactly ``n`` trajectories of one prompt, by index 0 .. n-1."""
        ...


def check_forks(sampler: object, protocol: str) -> None:
    """Raises ValueError for a sampler, or a class of them, that forks where the protocol named writes a new prompt for
    every turn."""
    if getattr(sampler, "forks", True):
        name = getattr(sampler, "__name__", type(sampler).__name__)
        raise ValueError(
            f"{name} forks trajectories at what they have read (or does not say forks = False), but "
            f"{protocol} writes a new prompt for every turn; take one conversation (window: null, history: sampled), "
            "or leave the sampler out"
        )


class IndependentSampler:
    """``n`` trajectories from the prompt, each on its own (GRPO, PPO)."""

    forks = False

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        return await run_independent(group, range(n))


async def run_independent(group: GroupRunner, indices: Iterable[int]) -> list[Trajectory]:
    """These members of a group, from the prompt."""
    async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
        running = [tasks.create_task(group.run(index)) for index in indices]
    return [task.result() for task in running]


def top_entropy(top: Mapping[int, float]) -> float:
    """Entropy in nats of one position, from {token id: log-prob} of its most likely tokens.

    The tokens that are not listed count as one outcome with the probability that is left, so that the value is a
    lower bound of the entropy over the whole vocabulary, and exact where nothing is left.

    >>> round(top_entropy({7: math.log(0.5), 9: math.log(0.25)}), 4)
    1.0397
    """
    probabilities = [math.exp(logprob) for logprob in top.values()]
    rest = 1.0 - sum(probabilities)
    if rest > 1e-9:
        probabilities.append(rest)
    return -sum(p * math.log(p) for p in probabilities if p > 0.0)


def first_tokens_entropy(tops: Sequence[Mapping[int, float]] | None, first: int) -> float | None:
    """Mean ``top_entropy`` over the first ``first`` positions; None without any."""
    if not tops or first < 1:
        return None
    taken = [top_entropy(top) for top in tops[:first]]
    return sum(taken) / len(taken)


def released_entropy(generation: Generation, first: int, vocabulary: int) -> float:
    """What ARPO's released code calls entropy (vllm_rollout_with_tools.py, 172-177 and 283-305).

    The sum over the first ``first`` positions of -p ln p over the most likely tokens and the sampled one, not
    renormalised, divided by the logarithm of the vocabulary's size. Not within [0, 1]: 20 uniform positions over ten
    tokens give 3.86 for 151,665 tokens. 0 for an empty generation.

    Raises:
        ValueError: the engine was not asked for top log-probs.
    """
    if generation.top_logprobs is None:
        raise ValueError("the engine returned no top log-probs; entropy needs them (SamplingParams.top_logprobs)")
    steps = zip(generation.token_ids, generation.logprobs, generation.top_logprobs, strict=True)
    entropy = 0.0
    for token, logprob, top in itertools.islice(steps, first):
        listed = top if token in top else {**top, token: logprob}
        entropy -= sum(math.exp(value) * value for value in listed.values() if value > -math.inf)
    return entropy / math.log(vocabulary)
