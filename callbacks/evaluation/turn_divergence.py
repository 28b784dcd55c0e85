"""Scores a test's trajectories with a teacher: divergence from the student and SOD's weight, turn by turn."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L

from callbacks.evaluation.evaluation import add_metrics
from callbacks.evaluation.turn_scores import (
    SCORES_FILE,
    TRAJECTORIES_FILE,
    TURNS_PREFIX,
    by_trajectory,
    save_scores,
    score_metrics,
    turn_scores,
    turns_with_tokens,
    verdicts_of,
)
from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.evaluation_rows import AGENT
from callbacks.trainer import data_module, stage_dir
from common.ranges import PositiveInt
from common.ranks import gather_lists, gather_objects
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

Key = tuple[int, bytes, str]


def choice_key(trajectory: Trajectory) -> Key:
    """Return a sort key that decides which trajectories are scored. Every question's first attempt comes first, then
    every second, ...; questions are in a pseudo-random order of their ids, so that all methods get the same ones."""
    task = trajectory.task.id
    return trajectory.index, hashlib.sha256(task.encode()).digest(), task


def has_turns(trajectory: Trajectory) -> bool:
    return bool(turns_with_tokens(trajectory)) and not trajectory.left_out


class TurnDivergence(EvaluationHooks):
    """After a test, measures how far a teacher's log-probs differ from the model's on each turn of the test's
    trajectories (``pl_module.turn_divergences``).

    Writes, in the stage folder, ``evaluation/turns.parquet`` (a row per turn, see ``turn_scores.TurnScore``) and the
    trajectories (``evaluation/scored_trajectories.parquet``, for ``rollout.storage.load_trajectories``); logs
    ``score_metrics`` and adds them to ``evaluation.json``. Validations are not scored.

    Args:
        teacher: folder of the teacher, which must have the policy's vocabulary.
        max_trajectories: trajectories to score, over all ranks: as many of every question as possible, the same ones
            for every method. Infrastructure failures among them are left out, not replaced.
    """

    def __init__(self, teacher: str, max_trajectories: PositiveInt = 400) -> None:
        self.teacher = teacher
        self.max_trajectories = max_trajectories
        self._kept: list[Trajectory] = []  # of this rank; those that may be chosen

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a training module or teacher that cannot score trajectories, before a model loads (TypeError,
        FileNotFoundError, ValueError)."""
        if not callable(getattr(pl_module, "turn_divergences", None)):
            raise TypeError(
                f"TurnDivergence needs a module with turn_divergences(trajectories, teacher), as PolicyModule has it; "
                f"{type(pl_module).__name__} has none; leave the callback out"
            )
        owner, _, name = self.teacher.partition("/")
        if not Path(self.teacher).is_dir() and (not owner or not name or "/" in name):
            raise FileNotFoundError(
                f"TurnDivergence: no teacher at '{self.teacher}'; expected a Hugging Face folder or owner/name"
            )
        if callable(check := getattr(pl_module, "check_judge", None)):
            check(self.teacher)

    def begin(self, split: str) -> None:
        self._kept = []

    def take(self, split: str, prompt_mode: str, trajectories: Sequence[Trajectory]) -> None:
        if prompt_mode == AGENT and split == "test":
            self._kept = heapq.nsmallest(self.max_trajectories, [*self._kept, *trajectories], key=choice_key)

    def _chosen(self, trainer: L.Trainer) -> list[Trajectory]:
        """Return the chosen trajectories that this rank scores. A trajectory on two ranks counts once."""
        kept_at: dict[Key, tuple[int, int]] = {}
        for rank, keys in enumerate(gather_objects([choice_key(t) for t in self._kept])):
            for i, key in enumerate(keys):
                kept_at.setdefault(key, (rank, i))
        chosen = [kept_at[key] for key in sorted(kept_at)[: self.max_trajectories]]
        mine = [self._kept[i] for rank, i in chosen if rank == trainer.global_rank]
        return [t for t in mine if has_turns(t)]

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        if split != "test":
            return
        mine, self._kept = self._chosen(trainer), []
        scored = cast(Any, pl_module).turn_divergences(mine, self.teacher)  # a collective: every rank calls it
        judge = getattr(data_module(trainer), "rollouts", None)
        verdicts = [verdicts_of(getattr(judge, "environment", None), t) for t in mine]
        own = [row for parts in zip(mine, scored, verdicts, strict=True) for row in turn_scores(*parts)]
        scores = by_trajectory(gather_lists(own))
        metrics = score_metrics(scores)
        add_metrics(trainer, pl_module, split, metrics, TURNS_PREFIX)
        trajectories = gather_lists(mine)
        if not trainer.is_global_zero:
            return
        folder = stage_dir(trainer)
        save_scores(folder / SCORES_FILE, [row for rows in scores for row in rows])
        save_trajectories(folder / TRAJECTORIES_FILE, sorted(trajectories, key=lambda t: (t.task.id, t.index)))
