"""The sampler interface, independent sampling, and the entropies that branching samplers use.

A sampler decides which trajectories of a prompt are rolled out, and may watch them while they run.
"""

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
    """A running trajectory, as a sampler sees it."""

    branch_probability: float | None  # of the current turn; a sampler sets it, for the metrics

    @property
    def key(self) -> int | str: ...  # the seeds of its requests are derived from key, group and turn
    @property
    def entropy(self) -> float | None: ...  # of the current turn, in nats; see ``Turn.entropy``
    @property
    def last_turn(self) -> bool: ...  # the next turn is the last: its calls are not executed


Hook = Callable[[RunningView, Generation], Awaitable[None]]


class EntropyProbe(Enum):
    """Says when a sampler measures the entropy of the next turn's first tokens."""

    NONE = auto()  # never: the turn is sampled as without hooks
    WITH_TURN = auto()  # after the whole turn: one request, with top log-probs of all its tokens
    BEFORE_THE_REST = auto()  # before the other tokens are sampled: one more request


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a sampler while a trajectory runs.

    The agent loop awaits each callback. A callback may start other trajectories (a fork), but must not await them.

    ``probe`` decides before each turn whether and when ``on_first_tokens`` is called. By default it is called before
    the rest of the turn is sampled, which costs one more request: the first ``first_tokens`` tokens are sampled alone,
    and the turn continues when the callback returns. Both receive the trajectory up to the start of the turn, so that a
    fork ``start=state, at=len(state.response_ids)`` shares the tokens before the turn, and not its first tokens.
    """

    first_tokens: int = 0  # number of tokens that Turn.entropy averages over
    top_logprobs: int = 0  # per token: of the first tokens, or of all tokens if the turn is one request
    probe: Callable[[RunningView], EntropyProbe] | None = None
    on_first_tokens: Hook | None = None
    on_turn: Hook | None = None  # after a sampled turn, before its calls run; receives the turn's last generation
    # After an observation, before the next turn. The trajectory releases its slot until the callback returns, so the
    # callback may wait for other trajectories.
    on_result: Callable[[RunningView], Awaitable[None]] | None = None


NO_HOOKS = Hooks()


class GroupRunner(Protocol):
    """Runs the trajectories of one prompt for a sampler."""

    @property
    def task(self) -> Task: ...
    @property
    def seed(self) -> int: ...  # for the sampler's decisions; the runs derive their own seeds
    @property
    def vocabulary(self) -> int: ...  # size of the tokenizer; published entropies are divided by its logarithm

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
        """Roll out and score trajectory ``index`` of the group. With ``start`` it forks from that trajectory at
        response offset ``at``.

        Args:
            key: the requests' seeds are derived from it; by default from the index. A sampler that numbers its members
                in order of arrival passes a key that does not depend on that order.
            counts: False for a probe, which is neither scored nor returned to the caller of the rollout.
        """
        ...


class Sampler(Protocol):
    """Decides which trajectories of a prompt are rolled out.

    A sampler that never branches (``GroupRunner.run`` without ``start``) sets ``forks = False``. Protocols with
    per-turn prompts accept only such samplers. Without the attribute a sampler counts as one that forks. A method
    ``check_group(n)`` may refuse a size of groups before an engine starts.
    """

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        """Return exactly ``n`` trajectories of one prompt, ordered by index 0 .. n-1."""
        ...


def check_forks(sampler: object, protocol: str) -> None:
    """Raise ValueError if a sampler forks trajectories, which protocols with per-turn prompts do not allow.

    Args:
        sampler: a sampler or its class.
        protocol: name of the protocol.
    """
    if getattr(sampler, "forks", True):
        name = getattr(sampler, "__name__", type(sampler).__name__)
        raise ValueError(
            f"{name} forks trajectories (or does not set forks = False), but {protocol} writes a new prompt for every "
            "turn; take one conversation (window: null, history: sampled), or leave the sampler out"
        )


class IndependentSampler:
    """Samples ``n`` independent trajectories from the prompt (GRPO, PPO)."""

    forks = False

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        return await run_independent(group, range(n))


async def run_independent(group: GroupRunner, indices: Iterable[int]) -> list[Trajectory]:
    """Roll out the trajectories ``indices`` of a group from the prompt, all at once, and return them."""
    async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
        running = [tasks.create_task(group.run(index)) for index in indices]
    return [task.result() for task in running]


def top_entropy(top: Mapping[int, float]) -> float:
    """Return the entropy in nats at one position, from {token id: log-prob} of its most likely tokens.

    All other tokens count as one outcome with the remaining probability. The value is a lower bound of the entropy over
    the whole vocabulary, and exact if no probability remains.

    >>> round(top_entropy({7: math.log(0.5), 9: math.log(0.25)}), 4)
    1.0397
    """
    probabilities = [math.exp(logprob) for logprob in top.values()]
    rest = 1.0 - sum(probabilities)
    if rest > 1e-9:
        probabilities.append(rest)
    return -sum(p * math.log(p) for p in probabilities if p > 0.0)


def first_tokens_entropy(tops: Sequence[Mapping[int, float]] | None, first: int) -> float | None:
    """Return the mean entropy in nats over the first ``first`` tokens, or None without tokens. ``tops``: see
    ``top_entropy``."""
    if not tops or first < 1:
        return None
    taken = [top_entropy(top) for top in tops[:first]]
    return sum(taken) / len(taken)


def released_entropy(generation: Generation, first: int, vocabulary: int) -> float:
    """Return the entropy of a turn's first tokens as ARPO's released code computes it (vllm_rollout_with_tools.py,
    172-177 and 283-305).

    The sum over the first ``first`` positions of -p ln p over the most likely tokens and the sampled one, not
    renormalised, divided by the logarithm of the vocabulary's size. The value can exceed 1: 20 uniform positions over
    ten tokens give 3.86 for 151,665 tokens. 0 for an empty generation.

    Raises:
        ValueError: the generation has no top log-probs.
    """
    if generation.top_logprobs is None:
        raise ValueError("the engine returned no top log-probs; entropy needs them (SamplingParams.top_logprobs)")
    steps = zip(generation.token_ids, generation.logprobs, generation.top_logprobs, strict=True)
    entropy = 0.0
    for token, logprob, top in itertools.islice(steps, first):
        listed = top if token in top else {**top, token: logprob}
        entropy -= sum(math.exp(value) * value for value in listed.values() if value > -math.inf)
    return entropy / math.log(vocabulary)
