"""Lets the tested model continue prefixes of saved trajectories, clean ones and ones after an error."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.evaluation.evaluation import add_metrics
from callbacks.evaluation.statistics import Interval, bootstrap_pooled
from callbacks.evaluation.turn_scores import verdicts_of, wrong_before
from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import AGENT, row_of
from callbacks.trainer import data_module
from common.ranges import PositiveInt
from common.ranks import gather_lists
from rollout.environments.base import EnvironmentFactory
from rollout.samplers.base import check_forks
from rollout.samplers.continuation import ContinuationSampler
from rollout.storage import load_trajectories
from rollout.trajectory import Trajectory
from rollout.trajectory_metrics import outcome_of

PREFIX = "continues/"  # of these metrics in evaluation.json
CLEAN, DRIFTED = "clean", "drifted"
Prefix = tuple[Trajectory, int]  # a trajectory, and the turn to sample again


def prefixes(trajectories: Iterable[Trajectory], environment: EnvironmentFactory) -> dict[str, list[Prefix]]:
    """Return all prefixes of saved trajectories that end before a later turn. They are "clean" if none of their turns
    is wrong (``is_wrong``), else "drifted"."""
    found: dict[str, list[Prefix]] = {CLEAN: [], DRIFTED: []}
    for trajectory in trajectories:
        outcomes = [outcome_of(trajectory, turn) for turn in range(len(trajectory.turns))]
        wrong = wrong_before(zip(outcomes, verdicts_of(environment, trajectory), strict=True))
        for turn in range(1, len(trajectory.turns)):
            before = trajectory.turns[turn - 1]
            if before.observation_end > before.end:  # a turn without an observation cannot be continued
                found[DRIFTED if wrong[turn] else CLEAN].append((trajectory, turn))
    return found


def choose(of_a_kind: Sequence[Prefix], count: int) -> list[Prefix]:
    """Choose at most ``count`` prefixes of trajectories in a pseudo-random order that depends only on task, attempt and
    turn."""

    def key(prefix: Prefix) -> bytes:
        trajectory, turn = prefix
        return hashlib.sha256(f"{trajectory.task.id} {trajectory.index} {turn}".encode()).digest()

    return sorted(of_a_kind, key=key)[:count]


class Continuations(EvaluationHooks):
    """After the test, lets the tested model continue prefixes of saved trajectories, once each, and measures its
    success.

    Adds the share of correct outcomes to ``evaluation.json``: ``continues/clean``, ``continues/drifted``, and each
    ``/<k>``, where the model takes over at turn k. Sampling is that of the test, and the outcome is
    ``EvaluationRow.accuracy``, whatever judge or answers the test's own table has.

    Args:
        trajectories: parquet file of ``rollout.storage`` or folder of such files, sampled by a policy with the same
            tokenizer.
        max_prefixes: prefixes of each kind.
    """

    def __init__(self, trajectories: str, max_prefixes: PositiveInt = 150) -> None:
        self.trajectories, self.max_prefixes = trajectories, max_prefixes

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_continues(data_module(trainer), type(self).__name__)
        saved_files(self.trajectories)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        if split != "test":
            return
        data = data_module(trainer)
        saved = (t for file in saved_files(self.trajectories) for t in load_trajectories(file))
        found = prefixes((t for t in saved if not t.left_out), data.rollouts.environment)
        metrics: dict[str, Interval] = {}
        for kind, of_a_kind in found.items():
            chosen = choose(of_a_kind, self.max_prefixes)
            mine = continued(data, chosen[trainer.global_rank :: trainer.world_size])
            outcomes = gather_lists([(turn, (t.task.id, [right])) for (t, turn), right in mine])
            if not outcomes:
                continue
            metrics[PREFIX + kind] = bootstrap_pooled([row for _, row in outcomes])
            for turn in sorted({at for at, _ in outcomes}):
                part = [row for at, row in outcomes if at == turn]
                metrics[f"{PREFIX}{kind}/{turn + 1}"] = bootstrap_pooled(part)
        add_metrics(trainer, pl_module, split, metrics, PREFIX)


def saved_files(path: str) -> list[Path]:
    """Return the parquet files at a path, a file's or a folder's. Raises FileNotFoundError if there is none."""
    files = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no trajectories at {path}; expected a parquet file, or a folder of such files")
    return files


def check_continues(data: Any, callback: str) -> None:
    """Raise ValueError if the data module cannot continue trajectories: it has no rollout system, or its protocol does
    not allow it."""
    rollouts = getattr(data, "rollouts", None)
    if rollouts is None:
        raise ValueError(f"{callback} goes on with other trajectories, which takes a rollout system; found none")
    if rollouts.program is not None:
        raise ValueError(f"{callback} continues trajectories from their middle, which a program cannot; leave it out")
    if getattr(rollouts.protocol, "per_turn_prompts", False):
        check_forks(ContinuationSampler, type(rollouts.protocol).__name__)


def continued(data: Any, chosen: Sequence[Prefix]) -> list[tuple[Prefix, float]]:
    """Sample the rest of each trajectory after its prefix, and judge the outcome. Return each prefix with 1.0 (correct)
    or 0.0. Infrastructure failures are left out."""
    tasks, starts = [], {}
    for trajectory, turn in chosen:
        name = f"{trajectory.task.id} {trajectory.index} {turn}"
        tasks.append(dataclasses.replace(trajectory.task, id=name))
        starts[name] = (trajectory, trajectory.turns[turn].start)
    sampled = data.sample("test", tasks, "continuations", ContinuationSampler(starts))
    by_name = {task.id: prefix for task, prefix in zip(tasks, chosen, strict=True)}
    judged = [(by_name[t.task.id], row_of(t, AGENT).accuracy) for t in sampled]
    return [(prefix, accuracy) for prefix, accuracy in judged if accuracy is not None]
