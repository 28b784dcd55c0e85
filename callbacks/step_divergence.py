"""How far teacher and student are apart on each step of a test's trajectories, and what SOD would weigh it by."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from pathlib import Path

import lightning as L

from callbacks.common import gather_lists, gather_objects, stage_dir
from callbacks.evaluation import log_figures, update_evaluation_file
from callbacks.evaluation_hooks import EvaluationHooks
from callbacks.rows import AGENT
from callbacks.step_rows import (
    SHOWN_STEPS,
    STEPS_FILE,
    STEPS_PREFIX,
    TRAJECTORIES_FILE,
    by_trajectory,
    save_steps,
    step_figures,
    step_rows,
    turns_with_tokens,
)
from rollout.storage import save_trajectories
from rollout.trajectory import Trajectory

Key = tuple[int, bytes, str]


def choice_key(trajectory: Trajectory) -> Key:
    """Which trajectories come first: every question's first attempt, then every question's second, ...; questions in
    an order of chance that depends on nothing but their ids, so that all methods are asked the same ones."""
    task = trajectory.task.id
    return trajectory.index, hashlib.sha256(task.encode()).digest(), task


def has_steps(trajectory: Trajectory) -> bool:
    return bool(turns_with_tokens(trajectory)) and not trajectory.failed_by_infrastructure


class StepDivergence(EvaluationHooks):
    """Scores the agent's trajectories of a test with a teacher, step by step (``pl_module.step_divergences``).

    Writes, in the stage folder, ``evaluation/steps.parquet`` (a row per step, see ``step_rows.StepRow``) and the
    trajectories themselves (``evaluation/steps_trajectories.parquet``, for ``rollout.storage.load_trajectories``);
    logs ``step_figures`` and adds them to ``evaluation.json``. Of a validation only the figures are kept.

    Args:
        teacher: folder of the teacher, which must have the policy's vocabulary.
        max_trajectories: how many are scored, over all ranks: as many of every question as possible, and the same
            ones whatever the method. Those that infrastructure spoiled are left out of them, not replaced.
        validation: score validations, too, not the test only.
        shown_steps: steps that have figures of their own.
    """

    def __init__(
        self, teacher: str, max_trajectories: int = 400, validation: bool = False, shown_steps: int = SHOWN_STEPS
    ) -> None:
        if max_trajectories < 1 or shown_steps < 1:
            raise ValueError(
                f"StepDivergence(max_trajectories={max_trajectories}, shown_steps={shown_steps}): expected both to be "
                "at least 1"
            )
        self.teacher = teacher
        self.max_trajectories = max_trajectories
        self.validation = validation
        self.shown_steps = shown_steps
        self._kept: list[Trajectory] = []  # of this rank; those that may be chosen

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raises TypeError or FileNotFoundError, before any model is loaded, where nothing could be scored."""
        if not callable(getattr(pl_module, "step_divergences", None)):
            raise TypeError(
                f"StepDivergence needs a module with step_divergences(trajectories, teacher), as PolicyModule has it; "
                f"{type(pl_module).__name__} has none; leave the callback out"
            )
        owner, _, name = self.teacher.partition("/")
        if not Path(self.teacher).is_dir() and (not owner or not name or "/" in name):
            raise FileNotFoundError(
                f"StepDivergence: no teacher at '{self.teacher}'; expected a Hugging Face folder or owner/name"
            )

    def begin(self, split: str) -> None:
        self._kept = []

    def take(self, split: str, probe: str, trajectories: Sequence[Trajectory]) -> None:
        if probe == AGENT and self._scores(split):
            self._kept = heapq.nsmallest(self.max_trajectories, [*self._kept, *trajectories], key=choice_key)

    def _scores(self, split: str) -> bool:
        return split == "test" or self.validation

    def _chosen(self, trainer: L.Trainer) -> list[Trajectory]:
        """This rank's part of the trajectories to score; what was met twice (on two ranks) counts once."""
        places: dict[Key, tuple[int, int]] = {}
        for rank, keys in enumerate(gather_objects([choice_key(t) for t in self._kept])):
            for i, key in enumerate(keys):
                places.setdefault(key, (rank, i))
        chosen = [places[key] for key in sorted(places)[: self.max_trajectories]]
        mine = [self._kept[i] for rank, i in chosen if rank == trainer.global_rank]
        return [t for t in mine if has_steps(t)]

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        if trainer.sanity_checking or not self._scores(split):
            return
        mine, self._kept = self._chosen(trainer), []
        scored = pl_module.step_divergences(mine, self.teacher)  # a collective: every rank calls it, with none too
        own = [row for t, figures in zip(mine, scored, strict=True) for row in step_rows(t, figures)]
        steps = by_trajectory(gather_lists(own))
        figures = step_figures(steps, shown_steps=self.shown_steps)
        log_figures(pl_module, split, figures)
        trajectories = gather_lists(mine) if split == "test" else []
        if not trainer.is_global_zero:
            return
        folder = stage_dir(trainer)
        if split == "test":
            save_steps(folder / STEPS_FILE, [row for rows in steps for row in rows])
            save_trajectories(folder / TRAJECTORIES_FILE, sorted(trajectories, key=lambda t: (t.task.id, t.index)))
        path = folder / "evaluation.json"
        update_evaluation_file(path, split, figures, lambda name: name.startswith(STEPS_PREFIX), {})
