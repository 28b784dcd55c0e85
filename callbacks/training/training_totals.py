"""Writes the totals of a training run (trajectories, calls, tokens, seconds) to training.json."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import lightning as L

from callbacks.tracking.run_info import TRAINING_FILE
from callbacks.trainer import data_module, stage_dir
from callbacks.training.throughput import is_trajectories, just_sampled
from common.files import write_atomically
from common.ranks import gather_objects
from rollout.trajectory_metrics import RolloutMetrics, rollout_metrics

LAST = 10  # iterations


class TrainingTotals(L.Callback):
    """Writes the totals of a training run (trajectories, calls, tokens, seconds) to ``training.json`` in the stage's
    output folder. The file is written after every iteration, before its checkpoint.

    It holds sums over all iterations and ranks (``trajectories``, ``tool_calls``, ``calls/<tool>``,
    ``tokens_computed_total``, ``iterations``, ``seconds`` with validations), the means and shares of
    ``RolloutMetrics.ratios`` (``distinct``, ``forked``, ``tokens_computed`` per trajectory, ...), ``last_reward`` and
    ``last_entropy_after_tools`` (both over the last 10 iterations). Trajectories that dynamic sampling discarded
    (``discarded_trajectories``) count in ``tool_calls`` and ``tokens_computed_total`` only.

    A resumed run continues from the sums in its checkpoint. Batches that were not rolled out for their iteration are
    not counted.
    """

    def __init__(self) -> None:
        self._totals = RolloutMetrics()
        self._discarded = RolloutMetrics()  # by dynamic sampling: these count as costs only
        self._last: deque[RolloutMetrics] = deque(maxlen=LAST)
        self._iterations = 0
        self._earlier_seconds = 0.0  # of the runs this one resumes
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + (time.monotonic() - self._started if self._started is not None else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "totals": self._totals.as_json(),
            "discarded": self._discarded.as_json(),
            "last": [metrics.as_json() for metrics in self._last],
            "iterations": self._iterations,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = RolloutMetrics.from_json(state_dict["totals"])
        self._discarded = RolloutMetrics.from_json(state_dict.get("discarded", {}))
        self._last = deque(map(RolloutMetrics.from_json, state_dict["last"]), maxlen=LAST)
        self._iterations = state_dict["iterations"]
        self._earlier_seconds = state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_trajectories(batch) or not just_sampled(trainer):
            return
        data = data_module(trainer)
        sampled = getattr(data, "sampled", batch)  # a mixed batch has rows: a turn each, and none that is too long
        mine = (rollout_metrics(sampled), rollout_metrics(getattr(data, "discarded", [])))
        ranks = gather_objects(mine)
        metrics = sum((kept for kept, _ in ranks), RolloutMetrics())
        self._discarded += sum((discarded for _, discarded in ranks), RolloutMetrics())
        self._totals += metrics
        self._last.append(metrics)
        self._iterations += 1
        if trainer.is_global_zero:
            content = json.dumps(self.totals(), indent=2, sort_keys=True, allow_nan=False)
            write_atomically(stage_dir(trainer) / TRAINING_FILE, content + "\n")

    def totals(self) -> dict[str, float]:
        """Return the content of ``training.json``, by name. Means without an observation are absent."""
        last = sum(self._last, RolloutMetrics())
        ratios = self._totals.ratios() | {
            "last_reward": (last.reward, last.rewarded),
            "last_entropy_after_tools": last.ratios()["entropy_after_tools"],
        }
        return {
            "iterations": self._iterations,
            "seconds": round(self.seconds, 1),
            "discarded_trajectories": self._discarded.trajectories,
            "tokens_computed_total": self._totals.tokens_computed + self._discarded.tokens_computed,
            **self._totals.sums(),
            "tool_calls": self._totals.tool_calls + self._discarded.tool_calls,
            **{name: total / count for name, (total, count) in ratios.items() if count},
        }
