"""Train and evaluation loaders that make each batch on demand and keep the position in the checkpoint.

Lightning prefetches from a train loader without a length, and would roll out the next iteration with old weights. All
loaders here have a length and do nothing before ``next``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rollout.protocols.base import PromptMode
from rollout.trajectory import Task, Trajectory

Item = TypeVar("Item")


def run_seed(seed: int | None) -> int:
    """Return ``seed``, or the run's ``seed_everything`` (Lightning keeps it in PL_GLOBAL_SEED), or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def permutation(n: int, seed: int) -> list[int]:
    """Return the numbers 0 .. n-1 as a list in an order that depends only on ``seed``."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def fingerprint(*parts: Any) -> str:
    """Return a short hash of the given settings. A loader's saved position is accepted only with the same hash."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class TrainLoader:
    """Train loader that makes an endless sequence of batches, cut into passes of ``length`` for Lightning.

    Batch ``i`` is ``make(i)`` and depends only on ``i`` (and, in rollouts, the weights). Every ``iter`` continues the
    stream, so a limit on batches per epoch never repeats or skips data.

    Args:
        length: batches per pass.
        make: makes batch ``i``.
        data: ``fingerprint`` of the data settings; a saved position is accepted only with the same.
        sampling: ``fingerprint`` of the sampling settings, likewise; older checkpoints without it are accepted.
    """

    def __init__(self, length: int, make: Callable[[int], list[Trajectory]], data: str, sampling: str = "") -> None:
        if length < 1:
            raise ValueError(f"a train loader of {length} batches; expected at least 1")
        self._length = length
        self._make = make
        self._data = data
        self._sampling = sampling
        self.position = 0  # batches handed out so far, over all passes

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Trajectory]]:
        for _ in range(self._length):
            batch = self._make(self.position)
            self.position += 1  # before the batch is used: a checkpoint written after the step counts it
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "data": self._data, "sampling": self._sampling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loader's position in the data. Raises ValueError if it was saved with other data or sampling
        settings.
        """
        if state["data"] != self._data:
            raise ValueError(
                "the checkpoint was written over other training data: the files, their order (seed), or the batch "
                "settings differ from this run's. Resume with the same data settings, or start a new run"
            )
        if state.get("sampling", self._sampling) != self._sampling:
            raise ValueError(
                "the checkpoint was written with another sampling: group_size, train_sampling, dynamic_sampling, "
                "mixing or the guide's share differ from this run's. Resume with the same ones, or start a new run"
            )
        self.position = state["position"]


class EvaluationLoader:
    """Evaluation loader that rolls out this rank's share of the tasks, in order, batch by batch.

    Rank r takes tasks r, r + world, ..., each once, in batches of nearly equal size: a single failure in a small last
    batch would be a large share of it. Every rank has the same number of batches, because collectives follow each, so
    some ranks' batches may be empty.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        mode: PromptMode,
        batch_size: int,
        rollout: Callable[[list[Task], PromptMode], list[Trajectory]],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.mode = mode
        self.tasks = list(tasks[rank::world_size])
        self._batch_size = batch_size
        self._rollout = rollout
        largest = -(-len(tasks) // world_size)
        self._length = -(-largest // batch_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Trajectory]]:
        ends = [-(-i * len(self.tasks) // max(self._length, 1)) for i in range(self._length + 1)]
        for start, end in itertools.pairwise(ends):
            yield self._rollout(self.tasks[start:end], self.mode)
