"""On-policy data module: rolls out each training batch on demand, or ahead of time (``max_off_policy_iterations``)."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError
from data_modules.datasets.ground_truths import ABILITIES
from data_modules.evaluation_data import Split, as_list
from data_modules.loading.decoding import UNCHANGED, Decoding
from data_modules.loading.failure_guard import FailureGuard
from data_modules.loading.loaders import TrainLoader, fingerprint, permutation
from data_modules.loading.rollouts_ahead import RolledOut, RolloutsAhead, check_staleness
from data_modules.loading.token_balance import balance
from data_modules.training_data import TrainingData
from rollout.protocols.base import PromptMode
from rollout.system import RolloutSystem, check_sleep
from rollout.trajectory import Task, Trajectory

Groups = list[list[Trajectory]]


class RolloutDataModule(TrainingData):
    """Yields ``list[Trajectory]`` of ``prompts_per_iteration * group_size`` trajectories per iteration, over all
    ranks. Each rank rolls out a block of the step's prompts, whole groups of them; with ``balance_tokens`` groups then
    change ranks.

    Questions come in an order that depends on the seed and the pass alone. Passes do not mix: the
    ``len(questions) % prompts_per_iteration`` questions left at the end of a pass wait for the next one, whose order is
    another. Sampling seeds derive from (seed, iteration), so that a resumed run draws the tokens it would have drawn,
    and any number of ranks draws the same (a branching sampler: see ``rollout.samplers.branching``). The position is
    saved in the checkpoint.

    Trajectories that failed by infrastructure are passed on (for the log; the on-policy module leaves them out).

    With ``dynamic_sampling`` (DAPO, arXiv 2503.14476) a group whose rewards are all equal, of which a group-relative
    algorithm learns nothing, is discarded and its slot offered to another prompt, up to so many times; if none of
    them does better, the first group stays, so that batches keep their size. The prompts offered to slot s of
    iteration i depend on (seed, i, s) alone: a resumed run offers the same, and so does any number of ranks, each of
    which fills its own slots. ``discarded_groups`` counts what was thrown away, ``discarded`` holds it.

    With ``max_off_policy_iterations`` k >= 1, when batch i is handed out the generation of the batches up to i + k
    begins, in the background and with the weights v_i that the engine then has (v_i: after i iterations). So every
    token trained on in iteration i was sampled with v_(i-k) or later: this is checked. What a background generation
    raises is raised when
    its batch is asked for. Validation waits until nothing is being generated. A checkpoint's position counts batches
    handed out: what was generated ahead is generated anew after a resume, with the weights of the checkpoint, so that
    the continuation is not that of the uninterrupted run, token for token. The questions of each batch, its seeds, and
    with dynamic sampling what is offered, are the same at any staleness. The collectives (of the failure guard) stay
    in the training thread, batch by batch. What becomes of trajectories in flight at a weight update is
    ``rollouts.in_flight``.

    Args:
        rollouts: rolls the questions out.
        train_files: question files (see datasets/questions.py).
        prompts_per_iteration: questions per iteration, over all ranks; divisible by the number of ranks.
        group_size: trajectories per question (a group).
        iterations: batches per Lightning epoch; None is one pass over the questions. With the length of the whole
            training here, ``trainer.max_epochs: 1`` ends it, and ``val_check_interval`` counts iterations.
        train_sampling: decoding while training.
        max_train: use at most so many questions, evenly spaced over the files.
        max_prompt_tokens: leave out questions whose prompt (chat template, tools and skills counted) is longer, before
            ``max_train`` applies; the log says how many, and names the first. By default, and at most, what the
            rollouts' ``max_length`` leaves: one token to sample, or a whole turn where each turn has its own prompt.
        dynamic_sampling: at most so many rounds of further prompts per iteration; null for none. Needs
            ``prompts_per_iteration * (1 + dynamic_sampling)`` questions.
        max_consecutive_failures: training stops after so many consecutive iterations above
            ``max_infrastructure_failures``.
        abilities: train on questions of these only (``math``, ``choice``, ``code``, ``qa``: ``metadata["ability"]``);
            the log counts the others. For OPSD with answers: [math, choice], since a program's tests are no answer that
            a teacher could be told.
        balance_tokens: with several ranks, exchange whole groups after the rollout, so that each rank learns from about
            as many tokens; changes speed only (``data_modules.loading.token_balance``).
        max_off_policy_iterations: batches generated ahead of the one that trains. 0: each is rolled out on demand.
        evaluation: see ``EvaluationData``.

    Raises (on ``setup``):
        DatasetError: a file is missing or wrong, or holds fewer (short enough) questions than one step may need.
        ValueError: prompts_per_iteration cannot be shared by the ranks.
    """

    rollouts: RolloutSystem

    def __init__(
        self,
        rollouts: RolloutSystem,
        train_files: Sequence[str],
        prompts_per_iteration: PositiveInt,
        group_size: PositiveInt = 1,
        iterations: PositiveInt | None = None,
        train_sampling: Decoding = UNCHANGED,
        max_train: PositiveInt | None = None,
        dynamic_sampling: PositiveInt | None = None,
        max_consecutive_failures: PositiveInt = 3,
        max_prompt_tokens: PositiveInt | None = None,
        abilities: list[str] | None = None,
        balance_tokens: bool = True,
        max_off_policy_iterations: NonNegativeInt = 0,
        **evaluation: Any,
    ) -> None:
        super().__init__(rollouts=rollouts, **evaluation)
        if rollouts.sleep_mode:
            check_sleep(rollouts.engine, rollouts.in_flight_updates, max_off_policy_iterations)
        if dynamic_sampling is not None and group_size < 2:
            raise ValueError(
                f"dynamic_sampling is {dynamic_sampling}, but group_size is {group_size}: the rewards "
                "of a group of one never differ; sample more per prompt or leave dynamic_sampling out"
            )
        if abilities is not None and (not abilities or not set(abilities) <= set(ABILITIES)):
            raise ValueError(f"abilities is {abilities}; expected some of {', '.join(ABILITIES)}, or null for all")
        self.abilities = abilities
        self.train_files = as_list("train_files", train_files)
        self.check_shared(self.train_files, *self.files.values())
        self.prompts_per_iteration = prompts_per_iteration
        self.group_size = group_size
        self.iterations = iterations
        self.train_sampling = train_sampling
        self.max_train = max_train
        self.max_prompt_tokens = max_prompt_tokens
        self.dynamic_sampling = dynamic_sampling
        self.balance_tokens = balance_tokens
        # Of the last iteration: tokens of the rank with most over the mean, as rolled out and balanced; None: not done.
        self.token_imbalance: tuple[float, float] | None = None
        self.max_off_policy_iterations = max_off_policy_iterations
        self.generation_s: float | None = None  # seconds that generating the last batch took, hidden or not
        self._ahead = (
            RolloutsAhead(rollouts, self._roll_out_ahead, max_off_policy_iterations)
            if max_off_policy_iterations
            else None
        )
        # Of the last iteration, on this rank: (groups thrown away, groups rolled out); None without dynamic sampling.
        self.discarded_groups: tuple[int, int] | None = None
        self.discarded: list[Trajectory] = []  # of the last iteration, this rank's
        self._guard = FailureGuard(self.max_infrastructure_failures, max_consecutive_failures)
        self._questions: list[Task] = []
        self._order: tuple[int, list[int]] = (-1, [])  # (pass, its permutation)

    @property
    def infrastructure_failures(self) -> float:
        """Share of the last iteration's trajectories, over all ranks, that failed for reasons not the model's."""
        return self._guard.share

    def setup(self, stage: str) -> None:
        if stage == "fit" and self._loader is None:
            tasks, where = self.questions.read(self.train_files), ", ".join(self.train_files)
            self._questions = self.questions.select(
                tasks, where, self.max_train, self.rollouts.first_prompts(), self.max_prompt_tokens, self.abilities
            )
            self._check_sizes()
            self.check_tasks(self._questions)
            ids = [task.id for task in self._questions]
            data = fingerprint(ids, self.prompts_per_iteration, self.seed, *self.questions.identity)
            further = () if self.dynamic_sampling is None else (self.dynamic_sampling,)
            sampling = fingerprint(self.group_size, self.train_sampling, *further)
            self._loader = TrainLoader(self.iterations or self.steps_per_pass, self._roll_out, data, sampling)
        super().setup(stage)
        if stage == "fit":
            self.start_rollouts()

    @property
    def steps_per_pass(self) -> int:
        """Iterations until every question had its turn."""
        return len(self._questions) // self.prompts_per_iteration

    @property
    def training_questions(self) -> tuple[Task, ...]:
        """All that were loaded, in the order of the files; empty before ``setup``."""
        return tuple(self._questions)

    def prompts(self, iteration: int) -> list[Task]:
        """The questions of iteration ``iteration`` (from 0), over all ranks. Pure: the same whenever it is called."""
        return [self._questions[i] for i in self._indices(iteration)]

    def further_prompts(self, iteration: int, attempt: int) -> list[Task]:
        """What dynamic sampling offers in its round ``attempt`` (from 0), one question per slot of the iteration, over
        all ranks; none of them stands in the iteration or in another of its rounds. Pure, as ``prompts``."""
        own = set(self._indices(iteration))
        order = permutation(len(self._questions), derive_seed(self.seed, "further", iteration))
        others = [i for i in order if i not in own]
        return [
            self._questions[i] for i in others[attempt * self.prompts_per_iteration :][: self.prompts_per_iteration]
        ]

    # ------------------------------------------------------------------------------------------------------------

    def _indices(self, iteration: int) -> list[int]:
        number, step = divmod(iteration, self.steps_per_pass)
        if self._order[0] != number:
            seed = derive_seed(self.seed, "order", number)
            self._order = (number, permutation(len(self._questions), seed))
        return self._order[1][step * self.prompts_per_iteration : (step + 1) * self.prompts_per_iteration]

    def _check_sizes(self) -> None:
        files, needed = ", ".join(self.train_files), self.prompts_per_iteration * (1 + (self.dynamic_sampling or 0))
        if len(self._questions) < self.prompts_per_iteration:
            raise DatasetError(
                f"{files}: {len(self._questions)} questions, but one step takes "
                f"prompts_per_iteration = {self.prompts_per_iteration} different ones; lower it or give more questions"
            )
        if len(self._questions) < needed:
            raise DatasetError(
                f"{files}: {len(self._questions)} questions, but one step with dynamic_sampling = "
                f"{self.dynamic_sampling} may take {needed} different ones; lower it or prompts_per_iteration"
            )
        if self.prompts_per_iteration % self.world_size:
            raise ValueError(
                f"prompts_per_iteration is {self.prompts_per_iteration}, which {self.world_size} ranks cannot share "
                f"equally; take a multiple of {self.world_size}"
            )

    def _roll_out(self, iteration: int) -> list[Trajectory]:
        if self._ahead is None:
            made = self._roll_out_now(iteration)
            self.rollouts.sleep()  # all rounds are done: until the next push the device is the trainer's
        else:
            made = self._ahead.take(iteration, self._last_iteration())
        kept, everything, self.generation_s = made.kept, made.everything, made.seconds
        if self.dynamic_sampling is not None:
            self.discarded_groups = (len(everything) - len(kept), len(everything))
            chosen = {id(group) for group in kept}
            self.discarded = [t for group in everything if id(group) not in chosen for t in group]
        rolled_out = [t for group in everything for t in group]
        self._guard.check(rolled_out, f"training iteration {iteration + 1}", self.rollouts.failures)
        if self.max_off_policy_iterations:
            check_staleness(rolled_out, self.rollouts.policy_version, self.max_off_policy_iterations)
        if self.world_size == 1:
            return [t for group in kept for t in group]
        first = self.rank * (self.prompts_per_iteration // self.world_size) * self.group_size
        share = balance(kept, first, self.rank, self.balance_tokens)
        self.token_imbalance = share.imbalance
        return share.trajectories

    def _roll_out_now(self, iteration: int) -> RolledOut:
        began = time.perf_counter()
        work = self._rounds(iteration)
        tasks = next(work)
        while True:
            try:
                tasks = work.send(self._groups(tasks, iteration))
            except StopIteration as done:
                kept, everything = done.value
                return RolledOut(kept, everything, time.perf_counter() - began)

    async def _roll_out_ahead(self, iteration: int) -> RolledOut:
        work = self._rounds(iteration)
        tasks = next(work)
        while True:
            trajectories = await self.rollouts.roll_out(tasks, batch=iteration, **self._how(iteration))
            try:
                tasks = work.send(self._by_group(trajectories))
            except StopIteration as done:
                return RolledOut(*done.value)

    def _rounds(self, iteration: int) -> Generator[list[Task], Groups, tuple[Groups, Groups]]:
        """Yields questions of this rank and is sent their groups, round by round; returns the groups that are kept, by
        slot, and all that were rolled out."""
        # A block per rank: the module deals rows to optimiser steps by position, and blocks keep that the same on any
        # number of ranks whose share is a multiple of the steps.
        share = self.prompts_per_iteration // self.world_size
        first = self.rank * share
        kept = yield self.prompts(iteration)[first : first + share]
        everything = list(kept)
        for attempt in range(self.dynamic_sampling or 0):
            constant = [slot for slot, group in enumerate(kept) if not differs(group)]
            if not constant:
                break
            offered = self.further_prompts(iteration, attempt)
            groups = yield [offered[first + slot] for slot in constant]
            everything += groups
            for slot, group in zip(constant, groups, strict=True):
                kept[slot] = group if differs(group) else kept[slot]
        return kept, everything

    def _groups(self, tasks: list[Task], iteration: int) -> Groups:
        """Roll out a group per question."""
        return self._by_group(self.rollouts.rollout(tasks, **self._how(iteration)))

    def _how(self, iteration: int) -> dict[str, Any]:
        # One seed for the whole iteration: requests derive theirs from the group.
        seed = derive_seed(self.seed, "train", iteration)
        return {"n": self.group_size, "sampling": self.train_sampling.params, "seed": seed}

    def _by_group(self, trajectories: list[Trajectory]) -> Groups:
        n = self.group_size
        return [trajectories[i : i + n] for i in range(0, len(trajectories), n)]

    def _last_iteration(self) -> int | None:
        """How many batches the training will ask for in all, as far as is known: none are generated beyond."""
        epochs, steps = (getattr(self.trainer, name, None) or -1 for name in ("max_epochs", "max_steps"))
        length = getattr(self.trainer, "num_training_batches", None)
        ends = [steps] if steps > 0 else []
        if epochs > 0 and isinstance(length, int):
            ends.append(epochs * length)
        return min(ends, default=None)

    # --- rollouts in flight --------------------------------------------------------------------------------------

    def _evaluate(self, split: Split, tasks: list[Task], mode: PromptMode) -> list[Trajectory]:
        if self._ahead is not None:
            self._ahead.settle()  # an evaluation has the engine to itself
        return super()._evaluate(split, tasks, mode)

    def teardown(self, stage: str) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        super().teardown(stage)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        super().close()


def differs(group: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group, failures left out, are not all the same."""
    return len({t.reward.total for t in group if t.reward is not None and not t.failed_by_infrastructure}) > 1
