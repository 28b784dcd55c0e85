"""Measures whether outcomes are still open after tool results, and whether entropy tells where."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import numpy as np

from callbacks.evaluation.continuations import Prefix, check_continues, choose, continued
from callbacks.evaluation.evaluation import add_metrics
from callbacks.evaluation.statistics import Interval, bootstrap_pooled
from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import AGENT
from callbacks.trainer import data_module
from common.ranges import PositiveInt
from common.ranks import gather_lists
from rollout.trajectory import Trajectory
from rollout.trajectory_metrics import turns_after_tools

PREFIX = "forks/"  # of these metrics in evaluation.json


def rise(trajectory: Trajectory, turn: int) -> float | None:
    """Return ARPO's dH of a turn, in nats: the entropy of its first tokens minus that of the trajectory's first turn.
    Returns None if one of the two was not recorded (``RolloutSystem(entropy_tokens=...)``)."""
    first, after = trajectory.turns[0].entropy, trajectory.turns[turn].entropy
    return None if first is None or after is None else after - first


class ForkOutcomes(EvaluationHooks):
    """After the test, continues the model's own trajectories several times from their tool results, to measure how open
    the outcome is.

    Adds to ``evaluation.json``, over the n tool results:

    - ``forks/open``: share of results after which some continuations were right and others wrong;
    - ``forks/correlation``: Pearson correlation of dH (``rise``) with the variance p (1 - p) of the outcome. Absent if
      one of the two is constant.

    Outcomes are judged as in the test's table (``EvaluationRow.accuracy``).

    Args:
        forks: continuations of each result.
        max_results: results that are continued, over all ranks.
    """

    def __init__(self, forks: PositiveInt = 8, max_results: PositiveInt = 150) -> None:
        if forks < 2 or max_results < 2:
            raise ValueError(f"ForkOutcomes(forks={forks}, max_results={max_results}): expected at least 2 of each")
        self.forks, self.max_results = forks, max_results
        self._results: list[Prefix] = []  # of this rank

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_continues(data_module(trainer), type(self).__name__)

    def begin(self, split: str) -> None:
        self._results = []

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        if split == "test" and prompt_mode == AGENT:
            usable = [t for t in trajectories if not t.left_out]
            self._results += [(t, k) for t in usable for k in turns_after_tools(t) if rise(t, k) is not None]

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        if split != "test":
            return
        chosen = choose(self._results, -(-self.max_results // trainer.world_size))
        ends = continued(data_module(trainer), [prefix for prefix in chosen for _ in range(self.forks)])
        right: dict[tuple[str, int, int], list[float]] = {}
        for (trajectory, turn), accuracy in ends:
            right.setdefault((trajectory.task.id, trajectory.index, turn), []).append(accuracy)
        rises = {(t.task.id, t.index, k): change for t, k in chosen if (change := rise(t, k)) is not None}
        shares = gather_lists([(place[0], rises[place], float(np.mean(each))) for place, each in right.items()])
        metrics = fork_metrics(shares)
        add_metrics(trainer, pl_module, split, metrics, PREFIX)


def fork_metrics(results: Sequence[tuple[str, float, float]]) -> dict[str, Interval]:
    """Compute the metrics of ``ForkOutcomes`` from (id of the question, entropy change dH, share of correct
    continuations), one for each tool result. Empty without results."""
    if not results:
        return {}
    questions = [question for question, _, _ in results]
    change, share = np.array([numbers for _, *numbers in results], dtype=float).T
    variance = share * (1 - share)
    metrics = {
        f"{PREFIX}open": bootstrap_pooled([(q, [float(v > 0)]) for q, v in zip(questions, variance, strict=True)])
    }
    if change.std() > 0 and variance.std() > 0:
        measures = np.stack([change, variance, change * variance, change**2, variance**2], axis=1).tolist()
        metrics[f"{PREFIX}correlation"] = bootstrap_pooled(list(zip(questions, measures, strict=True)), _correlation)
    return metrics


def _correlation(means: np.ndarray) -> np.ndarray:
    x, y, xy, xx, yy = means
    return (xy - x * y) / np.sqrt((xx - x**2) * (yy - y**2))
