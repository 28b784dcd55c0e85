"""Generates batches in the background while earlier ones train (``max_off_policy_iterations``)."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.system import RolloutSystem
from rollout.trajectory import Trajectory


@dataclass(slots=True)
class RolledOut:
    """The rollouts of one iteration on this rank."""

    kept: list[list[Trajectory]]  # by prompt
    everything: list[list[Trajectory]]  # with the groups that dynamic sampling discarded
    seconds: float = 0.0  # from the beginning of the generation to its end


class StalenessError(RuntimeError):
    """A trajectory has a token from older weights than ``max_off_policy_iterations`` allows.

    The cause is a bug, or weights that are not pushed once an iteration.
    """


@dataclass(slots=True)
class RolloutsAhead:
    """Generates up to ``limit`` rollout batches ahead of the batch that trains, in the event loop of the rollout
    system.

    Args:
        rollouts: rolls out.
        make: the coroutine that makes a batch; runs in the system's event loop.
        limit: batches ahead.
    """

    rollouts: RolloutSystem
    make: Callable[[int], Coroutine[Any, Any, RolledOut]]
    limit: int
    _pending: dict[int, concurrent.futures.Future[RolledOut]] = field(default_factory=dict)

    def take(self, iteration: int, end: int | None) -> RolledOut:
        """Return the rollouts of ``iteration`` once they are ready, and start the later ones (before ``end``) with the
        engine's current weights.

        Raises the exception of its generation.
        """
        for other in [i for i in self._pending if not iteration <= i <= iteration + self.limit]:
            self._drop(other)  # of an earlier position: a checkpoint was loaded
        self._begin(iteration)
        try:
            made = self._pending[iteration].result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the rollout system was closed while trajectories were in flight") from None
        except BaseException:
            self.cancel()  # Ctrl-C or an error
            raise
        del self._pending[iteration]
        last = iteration + self.limit
        for following in range(iteration + 1, (last if end is None else min(last, end - 1)) + 1):
            self._begin(following)
        return made

    def settle(self) -> None:
        """Wait until all batches being generated have finished. Errors are raised later, by ``take``."""
        concurrent.futures.wait(self._pending.values())

    def cancel(self) -> None:
        """Cancel the batches being generated and discard them."""
        for iteration in list(self._pending):
            self._drop(iteration)

    def _begin(self, iteration: int) -> None:
        if iteration not in self._pending:
            self._pending[iteration] = self.rollouts.background(self._timed(iteration))

    def _drop(self, iteration: int) -> None:
        self._pending.pop(iteration).cancel()

    async def _timed(self, iteration: int) -> RolledOut:
        began = time.perf_counter()
        made = await self.make(iteration)
        made.seconds = time.perf_counter() - began
        return made


def check_staleness(trajectories: Sequence[Trajectory], version: int, limit: int) -> None:
    """Raise StalenessError if a sampled token is from weights before ``version - limit``. Skips trajectories that
    infrastructure failed, which are not trained on.
    """
    for t in trajectories:
        versions = [] if t.left_out else [v for turn in t.turns for v, _ in turn.versions]
        if versions and min(versions) < version - limit:
            raise StalenessError(
                f"trajectory {t.group}/{t.index} holds tokens of weights {min(versions)}, but the engine has weights "
                f"{version} and max_off_policy_iterations is {limit}: expected {version - limit} or later. "
                "Push weights once after each iteration (callbacks.training.weight_sync.WeightSync)"
            )
