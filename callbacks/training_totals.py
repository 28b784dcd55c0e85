"""What a training has cost and where it has ended, in one small file that tables read without MLflow."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import lightning as L

from callbacks.common import gather_objects, stage_dir
from callbacks.results import TRAINING_FILE
from callbacks.throughput import is_trajectories
from rollout.figures import RolloutFigures, rollout_figures
from rollout.files import write_atomically

LAST = 10  # iterations


class TrainingTotals(L.Callback):
    """Keeps ``training.json`` in the stage folder: over all iterations so far and all ranks the sums ``trajectories``,
    ``tool_calls``, ``calls/<tool>``, the means and shares of ``RolloutFigures.ratios`` (``distinct``, ``forked``,
    ``tokens_computed`` per trajectory, ...), ``tokens_computed_total``, ``iterations`` and ``seconds`` (of training,
    validations included). What dynamic sampling threw away (``discarded_trajectories``) is in ``tool_calls`` and
    ``tokens_computed_total``, since it was paid for, and in nothing else. Over the last 10 iterations ``last_reward``
    and ``last_entropy_after_tools``.

    Written after every iteration, before its checkpoint, since a run may be killed between its last checkpoint and
    its end. A resumed run goes on from the sums in its checkpoint. Batches that are no rollouts are not counted.
    """

    def __init__(self) -> None:
        self._totals = RolloutFigures()
        self._discarded = RolloutFigures()  # by dynamic sampling: no part of any figure but the costs
        self._last: deque[RolloutFigures] = deque(maxlen=LAST)
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
            "last": [figures.as_json() for figures in self._last],
            "iterations": self._iterations,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = RolloutFigures.from_json(state_dict["totals"])
        self._discarded = RolloutFigures.from_json(state_dict.get("discarded", {}))
        self._last = deque(map(RolloutFigures.from_json, state_dict["last"]), maxlen=LAST)
        self._iterations = state_dict["iterations"]
        self._earlier_seconds = state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_trajectories(batch):
            return
        mine = (rollout_figures(batch), rollout_figures(getattr(trainer.datamodule, "discarded", [])))
        ranks = gather_objects(mine)
        figures = sum((kept for kept, _ in ranks), RolloutFigures())
        self._discarded += sum((discarded for _, discarded in ranks), RolloutFigures())
        self._totals += figures
        self._last.append(figures)
        self._iterations += 1
        if trainer.is_global_zero:
            content = json.dumps(self.totals(), indent=2, sort_keys=True, allow_nan=False)
            write_atomically(stage_dir(trainer) / TRAINING_FILE, content + "\n")

    def totals(self) -> dict[str, float]:
        """What the file holds. Means without an observation are absent."""
        last = sum(self._last, RolloutFigures())
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
