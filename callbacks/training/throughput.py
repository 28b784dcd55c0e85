"""Logs the seconds of each phase of a training iteration, and tokens and trajectories per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning as L

from callbacks.trainer import callbacks_of, data_module
from common.ranks import gather_objects
from rollout.trajectory import Trajectory, split_turns


class Throughput(L.Callback):
    """Logs the seconds of each phase of a training iteration, and tokens and trajectories per second. Times are means
    over ranks, rates are sums unless noted; validation is excluded:

    - ``time/train``: seconds in the training step;
    - ``time/rollout``: seconds of waiting for the batch (``time/data`` if the batch was not rolled out for this
      iteration), and of waiting for rollouts before a weight push (``rollouts.in_flight_updates: false``);
    - ``time/sync``, ``time/checkpoint``: seconds in WeightSync and IterationCheckpoint since the previous iteration;
    - ``throughput/trajectories_per_s``, ``throughput/tokens_per_s`` (prompt and response) over the whole iteration;
    - ``time/generation``: seconds from the start to the end of the batch's generation, if the data module reports
      ``generation_s``;
    - ``throughput/hidden_generation``: 1 - time/rollout / time/generation, at least 0: the share of generation that
      overlapped with training (``data.max_off_policy_iterations``; about 0 without it);
    - ``throughput/rollout_tokens_per_s``: sampled tokens of all ranks over the generation seconds of the slowest rank
      (its waiting seconds without ``generation_s``). Tokens that dynamic sampling discarded are not counted.

    Args:
        on_policy: whether batches are generated while training; decides between time/rollout and time/data.
    """

    def __init__(self, on_policy: bool = True) -> None:
        self.on_policy = on_policy
        self._since = 0.0  # start of the batch before (of the training, before the first)
        self._train = 0.0  # seconds of its training step
        self._phases: dict[str, float] = {}  # cumulative seconds of the timed callbacks at that moment
        self._waited: dict[str, float] = {}
        self._validation: tuple[float, dict[str, float]] = (0.0, {})  # when it began, and the phases then

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since, self._train, self._phases = time.perf_counter(), 0.0, phase_seconds(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation = time.perf_counter(), phase_seconds(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Move the clock forward by the validation, and forget what was pushed or saved inside it.
        began, before = self._validation
        self._since += time.perf_counter() - began
        for phase, seconds in phase_seconds(trainer).items():
            self._phases[phase] = self._phases.get(phase, 0.0) + seconds - before.get(phase, 0.0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        now, phases = time.perf_counter(), phase_seconds(trainer)
        self._waited = {phase: phases[phase] - self._phases.get(phase, 0.0) for phase in phases}
        waiting = now - self._since - self._train - sum(self._waited.values())
        self._waited["rollout" if self.on_policy and just_sampled(trainer) else "data"] = max(waiting, 1e-9)
        self._since, self._phases = now, phases

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Timed callbacks may stand before or after this one: what they have spent since the start is not training.
        already = sum(seconds - self._phases.get(phase, 0.0) for phase, seconds in phase_seconds(trainer).items())
        self._train = time.perf_counter() - self._since - already
        sync = trainer.world_size > 1
        times = {f"time/{phase}": seconds for phase, seconds in self._waited.items()} | {"time/train": self._train}
        pl_module.log_dict(times, sync_dist=sync, batch_size=1)
        sampled = "rollout" in self._waited
        generated = getattr(data_module(trainer), "generation_s", None) if sampled else None
        if generated:
            hidden = max(0.0, 1.0 - self._waited["rollout"] / generated)
            metrics = {"time/generation": generated, "throughput/hidden_generation": hidden}
            pl_module.log_dict(metrics, sync_dist=sync, batch_size=1)
        if is_trajectories(batch):
            pl_module.log_dict(_rates(batch, sum(times.values())), sync_dist=sync, reduce_fx="sum", batch_size=1)
            if sampled:
                rate = rollout_tokens_per_s(batch, generated or self._waited["rollout"])
                pl_module.log("throughput/rollout_tokens_per_s", rate, sync_dist=sync, batch_size=1)


def just_sampled(trainer: L.Trainer) -> bool:
    """Return whether the training batch was rolled out for this iteration, according to the data module
    (``data.just_sampled``; True without it)."""
    return getattr(data_module(trainer), "just_sampled", True)


def is_trajectories(batch: Any) -> bool:
    """Return whether the batch is a list of trajectories. An empty list counts, so that all ranks agree."""
    return isinstance(batch, list) and all(isinstance(item, Trajectory) for item in batch)


def phase_seconds(trainer: L.Trainer) -> dict[str, float]:
    """Return the total seconds spent so far in each timed phase, by phase name. Timed callbacks have ``phase`` and
    ``seconds``."""
    totals: dict[str, float] = {}
    for callback in callbacks_of(trainer):
        phase, seconds = getattr(callback, "phase", None), getattr(callback, "seconds", None)
        if isinstance(phase, str) and isinstance(seconds, float):
            totals[phase] = totals.get(phase, 0.0) + seconds
    return totals


def rollout_tokens_per_s(batch: Sequence[Trajectory], rollout_s: float) -> float:
    """Return the rollout throughput in tokens per second: tokens sampled on all ranks, divided by the rollout time of
    the slowest rank. A collective.

    Args:
        batch: this rank's trajectories, after the exchange between ranks.
        rollout_s: seconds of this rank's own rollouts.
    """
    own = (t.loss_mask[t.fork.at if t.fork else 0 :] for t in batch)  # a fork's prefix counts in its parent
    tokens, seconds = zip(*gather_objects((sum(map(sum, own)), rollout_s)), strict=True)
    return sum(tokens) / max(seconds)


def _rates(batch: Sequence[Trajectory], iteration_s: float) -> dict[str, float]:
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for t in batch for row in split_turns(t))
    return {
        "throughput/trajectories_per_s": len(batch) / iteration_s,
        "throughput/tokens_per_s": tokens / iteration_s,
    }
