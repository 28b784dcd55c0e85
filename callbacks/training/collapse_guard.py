"""Detects the collapse of a policy during training, saves the evidence, and can stop the run.

Search agents trained by RL are known to collapse (docs/algorithms/dgpo.md): reward falls, entropy or gradient
norm explodes, responses grow to the limit or turn into invalid actions. Distilled ones stop calling their tools
(docs/algorithms/sod.md), or their entropy dies.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median as _median
from typing import Any

import lightning as L
import torch

from callbacks.evaluation_rows import valid_action_counts
from callbacks.trainer import stage_dir
from callbacks.training.throughput import is_trajectories
from common.files import write_atomically
from common.ranges import PositiveInt
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

log = logging.getLogger(__name__)

CALLS = "train/tool_calls_per_trajectory"


@dataclass(slots=True)
class CollapseDetector:
    """Detects that a metric has stayed away from its reference value for ``patience`` updates in a row.

    The reference is the median of the last ``window`` calm values, or with ``window`` None the running maximum. Values
    that are off are not calm, so that a collapse does not become the reference while it lasts. A ``factor`` above 1
    means: above ``factor`` times the reference, or not finite (which fires at once). Below 1: under that share of the
    reference, unless the reference is below ``floor``, which counts as noise.

    With ``spreads``, off means ``spreads`` robust standard deviations (1.4826 times the median distance of the calm
    values from their median, at least 0.02) below the median. Rewards need this: they may be negative or constant.

    The median lags half a ``window`` behind a steady change: with factor 0.6 and window 20, losing 40 % within ten
    updates fires and within a hundred does not.
    """

    factor: float = 1.0
    patience: int = 5
    window: int | None = 50
    warmup: int = 10  # calm values needed before anything is off
    floor: float = 0.0
    spreads: float | None = None
    calm: deque[float] = field(init=False)
    off: int = field(default=0, init=False)  # updates in a row

    def __post_init__(self) -> None:
        self.calm = deque(maxlen=self.window)

    def update(self, value: float) -> str | None:
        """Check the next value of the metric. Returns the reason, as text, if the detector fires, else None."""
        if not math.isfinite(value):
            return f"not a finite number ({value})" if self.factor > 1 else None
        found = self._fault(value) if len(self.calm) >= max(self.warmup, 1) else None
        if found is None:
            self.calm.append(value)
            self.off = 0
            return None
        self.off += 1
        return f"{found} for {self.off} iterations, now {value:.3g}" if self.off >= self.patience else None

    def _fault(self, value: float) -> str | None:
        name, reference = ("maximum", max(self.calm)) if self.window is None else ("median", _median(self.calm))
        if self.spreads is not None:
            spread = max(1.4826 * _median([abs(calm - reference) for calm in self.calm]), 0.02)
            low = value < reference - self.spreads * spread
            return (
                f"more than {self.spreads:g} spreads ({spread:.3g}) below its median {reference:.3g}" if low else None
            )
        if self.factor > 1:
            return (
                f"above {self.factor:g} times its {name} {reference:.3g}" if value > self.factor * reference else None
            )
        low = reference >= self.floor and value < self.factor * reference
        return f"below {self.factor:.0%} of its {name} {reference:.3g}" if low else None


class CollapseGuard(L.Callback):
    """Watches training metrics for the collapse of the policy, and warns or stops the run. Each rule (a
    ``CollapseDetector``) fires once.

    * ``train/em``, ``train/acc`` (right answers, where the reward says so), ``train/success`` (where the environment
      scores itself) and the share of valid actions: under half of their running maximum for ``patience`` iterations
      (docs/algorithms/dgpo.md), once the maximum is at least 0.05 (valid actions: 0.2);
    * tool calls per trajectory: for 3 iterations more than 40 % below the median of the last 20 calm ones, about what
      they were ten iterations before (docs/algorithms/sod.md; a policy that unlearns its tool is lost within 20);
    * ``train/reward``: for 5 iterations more than 5 times its own scatter below its recent median;
    * ``train/entropy``: above 3 times, or under a fifth of its recent median for 5 iterations;
    * ``train/response_tokens`` above 3 times, ``train/grad_norm`` above 10 times their recent median for 5 iterations,
      or not finite.

    Recent medians are over the last 50 calm iterations, and nothing is judged before the tenth (tool calls: fifth). The
    callback logs ``train/valid_actions`` and ``train/tool_calls_per_trajectory`` (executed calls; a fork's inherited
    calls count once). Infrastructure failures are left out.

    When a rule fires: a warning, and ``collapse/iteration-<n>.json`` (the rule and the history of all watched metrics)
    with the batch's trajectories beside it as parquet.

    Args:
        stop: also end the run on all ranks; otherwise only warn.
        patience: iterations of few right answers or of invalid actions before the rule fires.
    """

    def __init__(self, stop: bool = False, patience: PositiveInt = 20) -> None:
        self.stop = stop
        self.rules: dict[str, tuple[str, CollapseDetector]] = {  # name -> (the watched metric, its detector)
            name: (name, CollapseDetector(0.5, patience, window=None, warmup=0, floor=floor))
            for name, floor in (
                ("train/em", 0.05), ("train/acc", 0.05), ("train/success", 0.05), ("train/valid_actions", 0.2),
            )
        }  # fmt: skip
        for name, factor in (("train/entropy", 3.0), ("train/response_tokens", 3.0), ("train/grad_norm", 10.0)):
            self.rules[name] = (name, CollapseDetector(factor))
        self.rules[CALLS] = (CALLS, CollapseDetector(0.6, patience=3, window=20, warmup=5, floor=0.2))
        self.rules["train/entropy (low)"] = ("train/entropy", CollapseDetector(0.2))
        self.rules["train/reward"] = ("train/reward", CollapseDetector(spreads=5.0))
        self.fired: dict[str, str] = {}
        self.history: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "fired": self.fired}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.fired = list(state_dict["history"]), dict(state_dict["fired"])
        for entry in self.history:  # the rules are functions of the history
            self._judge(entry)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stop and self.fired:  # a resume of a run that a rule has ended, to finish its test
            log.warning("not training on: %s", "; ".join(self.fired.values()))
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_trajectories(batch):
            counts = torch.tensor(action_counts(batch), dtype=torch.float32, device=pl_module.device)
            valid, turns = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
            if turns:
                pl_module.log("train/valid_actions", valid / turns, batch_size=1)
        metrics = trainer.callback_metrics
        entry = {name: float(metrics[name]) for name, _ in self.rules.values() if name in metrics}
        if str(trainer.precision).startswith("16") and not math.isfinite(entry.get("train/grad_norm", 0.0)):
            del entry["train/grad_norm"]  # the loss scaler of float16 tries scales that are too large
        trajectories = float(metrics.get("train/trajectories", 0.0))
        if trajectories and "train/tool_calls" in metrics:  # both are sums over all ranks
            entry[CALLS] = float(metrics["train/tool_calls"]) / trajectories
            pl_module.log(CALLS, entry[CALLS], batch_size=1)
        entry["iteration"] = float(trainer.fit_loop.total_batch_idx + 1)
        self.history.append(entry)
        new = {name: reason for name, reason in self._judge(entry).items() if name not in self.fired}
        self.fired |= new
        if new and trainer.is_global_zero:
            self._report(trainer, new, batch)
        if trainer.strategy.reduce_boolean_decision(bool(new) and self.stop, all=False):
            trainer.should_stop = True

    def _judge(self, entry: dict[str, float]) -> dict[str, str]:
        watched = {name: (entry[metric], rule) for name, (metric, rule) in self.rules.items() if metric in entry}
        verdicts = {name: rule.update(value) for name, (value, rule) in watched.items()}
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
    """Return how many turns of a batch are valid, and how many it has, without infrastructure failures. The protocol
    can read the action of a valid turn."""
    counts = [valid_action_counts(t) for t in batch if not t.left_out]
    return sum(valid for valid, _ in counts), sum(turns for _, turns in counts)
