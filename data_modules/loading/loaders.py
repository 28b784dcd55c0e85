"""Train and evaluation loaders: a batch is made when it is asked for, and the position is part of the checkpoint.

Lightning prefetches from a train loader without a length, and would so roll out the next iteration with the weights
of the one before the last. All loaders here have one, and make nothing before ``next``.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rollout.protocols.base import PromptMode
from rollout.trajectory import Task, Trajectory

Item = TypeVar("Item")


def run_seed(seed: int | None) -> int:
    """``seed``, or the run's ``seed_everything`` (Lightning keeps it in PL_GLOBAL_SEED), or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def permutation(n: int, seed: int) -> list[int]:
    """0 .. n-1 in an order that depends on ``seed`` alone."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order


def fingerprint(*parts: Any) -> str:
    """Short hash of what a saved position refers to."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class TrainLoader:
    """An endless stream of batches, cut into passes of ``length`` for Lightning.

    Batch ``i`` is ``make(i)`` and depends on nothing else than ``i`` (and, in rollouts, the weights). Every ``iter``
    goes on where the stream is, so a limit on batches per epoch never repeats or skips data.

    Args:
        length: batches per pass.
        make: makes batch ``i``.
        data: ``fingerprint`` of all that decides what batch ``i`` is; a saved position is only taken over the same.
        sampling: ``fingerprint`` of how batch ``i`` is sampled, likewise; checkpoints from before it was saved are
            taken as they are.
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
        """Raises ValueError when the position was saved over other data, or with another sampling."""
        if state["data"] != self._data:
            raise ValueError(
                "the checkpoint was written over other training data: the files, their order (seed), or the batch "
                "settings differ from this run's, so its position means nothing here. Resume with the same data "
                "settings, or start anew"
            )
        if state.get("sampling", self._sampling) != self._sampling:
            raise ValueError(
                "the checkpoint was written with another sampling: group_size, train_sampling, "
                "dynamic_sampling or mixing differ from this run's. Resume with the same ones, or start anew"
            )
        self.position = state["position"]


class EvaluationLoader:
    """One pass over tasks in order, a rank's share of them, rolled out batch by batch.

    Rank r takes tasks r, r + world, ...: no row is dropped or doubled. Every rank has the same number of batches (the
    collectives around them must meet), so the last ones of some ranks may be empty lists.
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
        for i in range(self._length):
            yield self._rollout(self.tasks[i * self._batch_size : (i + 1) * self._batch_size], self.mode)
