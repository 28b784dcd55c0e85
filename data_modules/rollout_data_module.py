"""On-policy data: each training batch is rolled out when it is asked for, with the engine's current weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from data_modules.datasets.files import DatasetError
from data_modules.datasets.questions import load_tasks
from data_modules.decoding import Decoding
from data_modules.evaluation_data import as_list
from data_modules.failures import FailureGuard
from data_modules.loaders import TrainLoader, fingerprint, permutation, spread
from data_modules.training_data import TrainingData
from rollout.sampling import derive_seed
from rollout.system import RolloutSystem
from rollout.trajectory import Task, Trajectory


class RolloutDataModule(TrainingData):
    """Yields ``list[Trajectory]`` of ``prompts_per_step * samples_per_prompt`` trajectories per iteration, over all
    ranks; rank r holds the whole groups of prompts r, r + world, ... of the step.

    Questions come in an order that depends on the seed and the pass alone. Passes do not mix: the
    ``len(questions) % prompts_per_step`` questions left at the end of a pass wait for the next one, whose order is
    another. Sampling seeds derive from (seed, iteration), so that a resumed run draws the tokens it would have drawn,
    and any number of ranks draws the same. The position is saved in the checkpoint.

    Trajectories that failed by infrastructure are passed on (for the log; the on-policy module leaves them out).

    Args:
        rollouts: rolls the questions out.
        train_files: question files (see datasets/questions.py).
        prompts_per_step: questions per iteration, over all ranks; divisible by the number of ranks.
        samples_per_prompt: trajectories per question (a group).
        iterations: batches per Lightning epoch; None is one pass over the questions. With the length of the whole
            training here, ``trainer.max_epochs: 1`` ends it, and ``val_check_interval`` counts iterations.
        train_sampling: decoding while training.
        max_train: use at most so many questions, evenly spaced over the files.
        failure_patience: consecutive iterations above ``max_infrastructure_failures`` after which training stops.
        evaluation: see ``EvaluationData``.

    Raises (on ``setup``):
        DatasetError: a file is missing or wrong, or holds fewer questions than one step needs.
        ValueError: prompts_per_step cannot be shared by the ranks.
    """

    def __init__(
        self,
        rollouts: RolloutSystem,
        train_files: Sequence[str],
        prompts_per_step: int,
        samples_per_prompt: int = 1,
        iterations: Optional[int] = None,
        train_sampling: Decoding = Decoding(),
        max_train: Optional[int] = None,
        failure_patience: int = 3,
        **evaluation: Any,
    ) -> None:
        super().__init__(rollouts=rollouts, **evaluation)
        for name, value in (
            ("prompts_per_step", prompts_per_step), ("samples_per_prompt", samples_per_prompt),
            ("iterations", iterations), ("max_train", max_train),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.train_files = as_list("train_files", train_files)
        self.prompts_per_step = prompts_per_step
        self.samples_per_prompt = samples_per_prompt
        self.iterations = iterations
        self.train_sampling = train_sampling
        self.max_train = max_train
        self._guard = FailureGuard(self.max_infrastructure_failures, failure_patience)
        self._questions: list[Task] = []
        self._order: tuple[int, list[int]] = (-1, [])  # (pass, its permutation)

    @property
    def infrastructure_failures(self) -> float:
        """Share of the last iteration's trajectories, over all ranks, that failed for reasons not the model's."""
        return self._guard.share

    def setup(self, stage: str) -> None:
        if stage == "fit" and self._loader is None:
            self._questions = spread(load_tasks(self.train_files), self.max_train)
            self._check_sizes()
            data = fingerprint([task.id for task in self._questions], self.prompts_per_step, self.seed)
            sampling = fingerprint(self.samples_per_prompt, self.train_sampling)
            self._loader = TrainLoader(self.iterations or self.steps_per_pass, self._roll_out, data, sampling)
        super().setup(stage)
        if stage == "fit":
            self.start_rollouts()

    @property
    def steps_per_pass(self) -> int:
        """Iterations until every question had its turn."""
        return len(self._questions) // self.prompts_per_step

    def prompts(self, iteration: int) -> list[Task]:
        """The questions of iteration ``iteration`` (from 0), over all ranks. Pure: the same whenever it is called."""
        number, step = divmod(iteration, self.steps_per_pass)
        if self._order[0] != number:
            seed = derive_seed(self.seed, "order", number)
            self._order = (number, permutation(len(self._questions), seed))
        chosen = self._order[1][step * self.prompts_per_step : (step + 1) * self.prompts_per_step]
        return [self._questions[i] for i in chosen]

    # ------------------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        if len(self._questions) < self.prompts_per_step:
            raise DatasetError(
                f"{', '.join(self.train_files)}: {len(self._questions)} questions, but one step takes "
                f"prompts_per_step = {self.prompts_per_step} different ones; lower it or give more questions"
            )
        if self.prompts_per_step % self.world_size:
            raise ValueError(
                f"prompts_per_step is {self.prompts_per_step}, which {self.world_size} ranks cannot share equally; "
                f"take a multiple of {self.world_size}"
            )

    def _roll_out(self, iteration: int) -> list[Trajectory]:
        # A block per rank: the module deals rows to optimiser steps by place, and blocks keep that the same on any
        # number of ranks whose share is a multiple of the steps.
        share = self.prompts_per_step // self.world_size
        trajectories = self.rollouts.rollout(  # type: ignore[union-attr]  # required here
            self.prompts(iteration)[self.rank * share : (self.rank + 1) * share],
            n=self.samples_per_prompt,
            sampling=self.train_sampling.params,
            seed=derive_seed(self.seed, "train", iteration),
        )
        self._guard.check(trajectories, f"training iteration {iteration + 1}", self.rollouts.failures)
        return trajectories
