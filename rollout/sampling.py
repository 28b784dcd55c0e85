"""Which trajectories exist: the seam between a prompt and its group."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollout.trajectory import Task, Trajectory

if TYPE_CHECKING:
    from rollout.engines.base import Generation
    from rollout.running_trajectory import RunningTrajectory


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**62) from the parts, the same in every process and on every machine (``hash()`` is not).

    >>> derive_seed(0, "q1", 3, 0) == derive_seed(0, "q1", 3, 0) != derive_seed(0, "q1", 30, 0)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2


@dataclass(frozen=True, slots=True)
class Watch:
    """What a sampler wants to see of a trajectory while it runs. Each callback is awaited where it is called; what it
    starts (a fork) must not be awaited in it.

    ``on_opening`` costs one more request per turn: the turn's first ``opening_tokens`` tokens are sampled by
    themselves, and the turn goes on when the callback has returned. The state it is given ends where the turn begins,
    so that a fork ``start=state, at=len(state.response_ids)`` shares what was read before, and not the opening.
    """

    opening_tokens: int = 0  # over which Turn.entropy is taken
    top_logprobs: int = 0  # asked of the engine: for the opening, or for the whole turn without ``on_opening``
    on_opening: Callable[[RunningTrajectory, Generation], Awaitable[None]] | None = None
    # After a sampled turn, before its calls run; the generation is the turn's last request.
    on_turn: Callable[[RunningTrajectory, Generation], Awaitable[None]] | None = None
    # After an observation was appended, before the next turn. The trajectory gives up its place among those under way
    # until the callback has returned, so that a callback may wait for other trajectories.
    on_result: Callable[[RunningTrajectory], Awaitable[None]] | None = None


class GroupRunner(Protocol):
    """What a sampler is given for one prompt."""

    task: Task
    seed: int  # for the sampler's own decisions; the runs derive theirs by themselves
    vocabulary: int  # tokens that the tokenizer knows: published entropies are scaled by its logarithm

    async def run(
        self,
        index: int,
        *,
        start: Trajectory | RunningTrajectory | None = None,
        at: int = 0,
        key: int | str | None = None,
        watch: Watch = Watch(),
        counts: bool = True,
    ) -> Trajectory:
        """Roll out member ``index``, scored. With ``start`` it branches off at response offset ``at``.

        Its requests' seeds are derived from ``key`` (by default the index), so that a sampler that numbers its
        members in order of arrival can name them by something else. With ``counts`` False it is neither scored nor
        handed to the caller of the rollout: a probe.
        """
        ...


class Sampler(Protocol):
    """Decides which trajectories of a prompt are rolled out."""

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        """Exactly ``n`` trajectories of one prompt, by index 0 .. n-1."""
        ...


class IndependentSampler:
    """``n`` trajectories from the prompt, each on its own (GRPO, PPO)."""

    async def sample(self, group: GroupRunner, n: int) -> list[Trajectory]:
        return await run_independent(group, range(n))


async def run_independent(group: GroupRunner, indices: Iterable[int]) -> list[Trajectory]:
    """These members of a group, from the prompt."""
    async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
        running = [tasks.create_task(group.run(index)) for index in indices]
    return [task.result() for task in running]
