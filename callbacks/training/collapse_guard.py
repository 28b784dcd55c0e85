"""Detects the collapse of a policy during training, saves the evidence, and can stop the run.

Search agents trained by RL are known to collapse (docs/papers/dgpo.md 2.5 and 7): reward falls, entropy or gradient
norm explodes, responses grow to the limit or turn into invalid actions. Distilled ones stop calling their tools
(docs/papers/sod.md 8.1), or their entropy dies.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from callbacks.evaluation_rows import valid_action_counts
from callbacks.trainer import stage_dir
from callbacks.training.collapse_rules import Drop, Explosion, Fall, Rule, Slump
from callbacks.training.throughput import is_trajectories
from common.files import write_atomically
from common.ranges import OpenUnitInterval, PositiveFloat, PositiveInt, UnitInterval
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

log = logging.getLogger(__name__)


CALLS = "train/tool_calls_per_trajectory"


class CollapseGuard(L.Callback):
    """Watches training iterations and reacts once per rule (``callbacks.training.collapse_rules``).

    * ``train/em``, ``train/acc`` (right answers, where the reward says so), ``train/success`` (where the environment
      scores itself) and the share of valid actions: under half of their running maximum for ``patience`` iterations
      (docs/papers/dgpo.md 2.5);
    * tool calls per trajectory: for 3 iterations more than 40 % below the median of the last 20 calm ones, about what
      they were ten iterations before (docs/papers/sod.md 8.3; a policy that unlearns its tool is lost within 20, 8.1);
    * ``train/reward``: for 5 iterations more than 5 times its own scatter below its recent median;
    * ``train/entropy``: above 3 times, or under a fifth of its recent median for 5 iterations;
    * ``train/response_tokens`` above 3 times, ``train/grad_norm`` above 10 times their recent median for 5 iterations,
      or not finite.

    Recent medians are over the last 50 calm iterations, and nothing is judged before the tenth (tool calls: fifth).
    What is counted here is logged: ``train/valid_actions``, ``train/tool_calls_per_trajectory`` (executed calls; those
    that a fork inherits count once). Trajectories that infrastructure failed enter nothing.

    When a rule fires: a warning, and ``collapse/iteration-<n>.json`` (the rule and the history of all watched metrics)
    with the batch's trajectories beside it as parquet.

    Args:
        stop: also end the training (on all ranks); otherwise only warn.
        patience: iterations of few right answers or of invalid actions before it counts.
        share: fraction of the running maximum that counts as low.
        min_em: running maximum of EM (or of right answers) below which nothing is called a collapse.
        tool_call_share: fraction of the recent tool calls per trajectory that counts as low; null: no such rule.
        entropy_share: fraction of the recent entropy that counts as low; null: no such rule.
        reward_spreads: how many spreads below its recent median a reward counts as low; null: no such rule.
    """

    def __init__(
        self,
        stop: bool = False,
        patience: PositiveInt = 20,
        share: OpenUnitInterval = 0.5,
        min_em: UnitInterval = 0.05,
        tool_call_share: OpenUnitInterval | None = 0.6,
        entropy_share: OpenUnitInterval | None = 0.2,
        reward_spreads: PositiveFloat | None = 5.0,
    ) -> None:
        if patience < 1 or not 0 < share < 1:
            raise ValueError(f"CollapseGuard(patience={patience}, share={share}): expected >= 1 and between 0 and 1")
        for name, value in (("tool_call_share", tool_call_share), ("entropy_share", entropy_share)):
            if value is not None and not 0 < value < 1:
                raise ValueError(f"CollapseGuard({name}={value}): expected a number between 0 and 1, or null")
        if reward_spreads is not None and reward_spreads <= 0:
            raise ValueError(f"CollapseGuard(reward_spreads={reward_spreads}): expected more than 0, or null")
        self.stop = stop
        # name of the rule -> (the metric it watches, the rule)
        self.rules: dict[str, tuple[str, Rule]] = {
            "train/em": ("train/em", Drop(share, patience, floor=min_em)),
            "train/acc": ("train/acc", Drop(share, patience, floor=min_em)),
            "train/success": ("train/success", Drop(share, patience, floor=min_em)),
            "train/valid_actions": ("train/valid_actions", Drop(share, patience, floor=0.2)),
            "train/entropy": ("train/entropy", Explosion(3.0)),
            "train/response_tokens": ("train/response_tokens", Explosion(3.0)),
            "train/grad_norm": ("train/grad_norm", Explosion(10.0)),
        }
        if tool_call_share is not None:
            self.rules[CALLS] = (CALLS, Fall(tool_call_share, patience=3, window=20, warmup=5, floor=0.2))
        if entropy_share is not None:
            self.rules["train/entropy (low)"] = ("train/entropy", Fall(entropy_share))
        if reward_spreads is not None:
            self.rules["train/reward"] = ("train/reward", Slump(reward_spreads, patience=5))
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
        entry = {name: float(metrics[name]) for name, _ in self.rules.values() if name in metrics}
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
    """(turns the protocol could read, all turns) of a batch, infrastructure failures left out."""
    counts = [valid_action_counts(t) for t in batch if not t.failed_by_infrastructure]
    return sum(valid for valid, _ in counts), sum(turns for _, turns in counts)
