"""Notices when a policy collapses, saves what it looked like, and can stop the run.

Search agents trained by RL are known to collapse (specs/dgpo.md 2.5 and 7): reward falls, entropy or gradient norm
explodes, responses grow to the limit or turn into invalid actions.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from callbacks.common import stage_dir
from callbacks.rows import valid_action_counts
from callbacks.throughput import is_trajectories
from rollout.files import write_atomically
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Drop:
    """Fires when a value has been below ``share`` of its running maximum for ``patience`` updates in a row.

    A maximum below ``floor`` is taken for noise: a run that never got off the ground has not collapsed.
    """

    share: float = 0.5
    patience: int = 20
    floor: float = 0.05
    best: float = -math.inf
    below: int = 0

    def update(self, value: float) -> str | None:
        self.best = max(self.best, value)
        low = self.best >= self.floor and value < self.share * self.best
        self.below = self.below + 1 if low else 0
        if self.below >= self.patience:
            return f"below {self.share:.0%} of its maximum {self.best:.3g} for {self.below} iterations, now {value:.3g}"
        return None


@dataclass(slots=True)
class Explosion:
    """Fires when a value has been above ``factor`` times its median over the last ``window`` calm updates for
    ``patience`` updates in a row, or at once when it is not a finite number."""

    factor: float
    patience: int = 5
    window: int = 50
    warmup: int = 10  # calm updates before anything is called an explosion
    calm: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    above: int = 0

    def __post_init__(self) -> None:
        self.calm = deque(self.calm, maxlen=self.window)

    def update(self, value: float) -> str | None:
        if not math.isfinite(value):
            return f"not a finite number ({value})"
        median = statistics.median(self.calm) if len(self.calm) >= self.warmup else math.inf
        if value > self.factor * median:
            self.above += 1
        else:
            self.above = 0
            self.calm.append(value)
        if self.above >= self.patience:
            return f"above {self.factor:g} times its median {median:.3g} for {self.above} iterations, now {value:.3g}"
        return None


class CollapseGuard(L.Callback):
    """Watches training iterations and reacts once per rule.

    Rules: ``train/em`` and the share of valid actions under half of their running maximum for ``patience`` iterations
    (specs/dgpo.md 2.5); ``train/entropy`` and ``train/response_tokens`` above 3 times, ``train/grad_norm`` above 10
    times their recent median for 5 iterations, or not finite. The share of valid actions is counted here and logged as
    ``train/valid_actions``.

    When a rule fires: a warning, and ``collapse/iteration-<n>.json`` (the rule and the history of all watched metrics)
    with the batch's trajectories beside it as parquet.

    Args:
        stop: also end the training (on all ranks); otherwise only warn.
        patience: iterations of low EM or of invalid actions before it counts.
        share: fraction of the running maximum that counts as low.
        min_em: running maximum of EM below which nothing is called a collapse.
    """

    def __init__(self, stop: bool = False, patience: int = 20, share: float = 0.5, min_em: float = 0.05) -> None:
        if patience < 1 or not 0 < share < 1:
            raise ValueError(f"CollapseGuard(patience={patience}, share={share}): expected >= 1 and between 0 and 1")
        self.stop = stop
        self.rules: dict[str, Drop | Explosion] = {
            "train/em": Drop(share, patience, floor=min_em),
            "train/valid_actions": Drop(share, patience, floor=0.2),
            "train/entropy": Explosion(3.0),
            "train/response_tokens": Explosion(3.0),
            "train/grad_norm": Explosion(10.0),
        }
        self.fired: dict[str, str] = {}
        self.history: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.fired = list(state_dict["history"]), dict(state_dict["fired"])
        for entry in self.history:  # the rules are functions of the history
            self._judge(entry)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_trajectories(batch):
            counts = torch.tensor(action_counts(batch), dtype=torch.float32, device=pl_module.device)
            valid, turns = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
            if turns:
                pl_module.log("train/valid_actions", valid / turns, batch_size=1)
        metrics = trainer.callback_metrics
        entry = {name: float(metrics[name]) for name in self.rules if name in metrics}
        entry["iteration"] = float(trainer.fit_loop.total_batch_idx + 1)
        self.history.append(entry)
        new = {name: reason for name, reason in self._judge(entry).items() if name not in self.fired}
        self.fired |= new
        if new and trainer.is_global_zero:
            self._report(trainer, new, batch)
        if trainer.strategy.reduce_boolean_decision(bool(new) and self.stop, all=False):
            trainer.should_stop = True

    def _judge(self, entry: dict[str, float]) -> dict[str, str]:
        verdicts = {name: rule.update(entry[name]) for name, rule in self.rules.items() if name in entry}
        return {name: verdict for name, verdict in verdicts.items() if verdict is not None}

    def _report(self, trainer: L.Trainer, reasons: dict[str, str], batch: Any) -> None:
        iteration = trainer.fit_loop.total_batch_idx + 1
        base = stage_dir(trainer) / "collapse" / f"iteration-{iteration:06d}"
        content = {"reasons": reasons, "history": self.history}
        # NaN is what this file may have to report; Python's json writes and reads it.
        write_atomically(base.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
        if is_trajectories(batch):
            save_trajectories(base.with_suffix(".parquet"), batch)
        for name, reason in reasons.items():
            log.warning(
                "iteration %d: %s is %s: the policy may be collapsing. %s Evidence: %s",
                iteration, name, reason, "Stopping." if self.stop else "Training goes on.", base.with_suffix(".json"),
            )  # fmt: skip


def action_counts(batch: Sequence[Trajectory]) -> tuple[int, int]:
    """(turns the protocol could read, all turns) of a batch, infrastructure failures left out."""
    counts = [valid_action_counts(t) for t in batch if not t.failed_by_infrastructure]
    return sum(valid for valid, _ in counts), sum(turns for _, turns in counts)
