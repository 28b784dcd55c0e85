"""On-policy data module: rolls out each training batch on demand, or ahead of time (``max_off_policy_iterations``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError
from data_modules.datasets.ground_truths import ABILITIES
from data_modules.evaluation_data import Split, as_list, refuse_for_programs
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


def check_groups(group_size: int | None, dynamic_sampling: int | None) -> None:
    """Raise ValueError for dynamic sampling of groups whose rewards never differ."""
    if dynamic_sampling is not None and group_size == 1:
        raise ValueError(
            f"data.dynamic_sampling is {dynamic_sampling}, but data.group_size is 1: the rewards of a group of one "
            "never differ; sample more per prompt or leave dynamic_sampling out"
        )


class RolloutDataModule(TrainingData):
    """On-policy data module that rolls out ``prompts_per_iteration * group_size`` trajectories per iteration over all
    ranks. Batches are ``list[Trajectory]``.

    Each rank rolls out a block of the iteration's prompts, in whole groups; ``balance_tokens`` then exchanges groups
    between ranks. Trajectories that failed by infrastructure are passed on for the log; the on-policy module leaves
    them out.

    The order of questions depends on the seed and the pass only. The ``len(questions) % prompts_per_iteration``
    questions that are left at the end of a pass are skipped in it. Sampling seeds derive from (seed, iteration): a
    resumed run, or one on another number of ranks, draws the same tokens (for branching samplers see
    ``rollout.samplers.branching``). The position is in the checkpoint.

    ``dynamic_sampling`` (DAPO, arXiv 2503.14476) discards groups with identical rewards, which give zero advantage, and
    samples other prompts in their slots, for this many rounds. If none has different rewards, the first group stays, so
    that the batch size is constant. The prompts offered to slot s of iteration i depend on (seed, i, s) only.
    ``discarded_groups`` counts the discarded groups, ``discarded`` holds their trajectories.

    With ``max_off_policy_iterations`` k >= 1, handing out batch i starts the generation of the batches up to i + k in
    the background, with the weights after i iterations. Every token of iteration i is thus from the weights of
    iteration i - k or later; this is checked. Errors are raised when their batch is due. Validation waits for the
    background. A resumed run generates batches in flight again with the checkpoint's weights, so its tokens may differ
    from the uninterrupted run; questions and seeds are the same for every k. Collectives stay in the training thread.
    ``rollouts.in_flight_updates`` decides what a weight update does with trajectories in flight.

    Args:
        rollouts: rolls the questions out.
        train_files: question files (see datasets/questions.py).
        prompts_per_iteration: questions per iteration, over all ranks; divisible by the number of ranks.
        group_size: trajectories per question (a group).
        iterations: batches per Lightning epoch (None: one pass over the questions). With the length of the whole run
            here, ``trainer.max_epochs: 1`` ends it, and ``val_check_interval`` counts iterations.
        train_sampling: decoding while training.
        max_train: use at most this many questions, evenly spaced over the files.
        max_prompt_tokens: leave out questions with longer prompts (chat template, tools and skills counted) before
            ``max_train`` applies; the log counts them and names the first. The default and the maximum is what
            ``max_length`` leaves: one token to sample, or a whole turn if each turn has its own prompt.
        dynamic_sampling: at most this many rounds of further prompts per iteration; null for none. Needs
            ``prompts_per_iteration * (1 + dynamic_sampling)`` questions.
        max_consecutive_failures: training stops after this many consecutive iterations above
            ``max_infrastructure_failures``.
        abilities: train only on questions of these (``math``, ``choice``, ``code``, ``qa``: ``metadata["ability"]``);
            the log counts the others. For OPSD with answers use [math, choice]: a program's tests are not an answer
            for the teacher.
        balance_tokens: exchange whole groups between ranks after the rollout, so that each rank learns from about as
            many tokens; changes speed only (``data_modules.loading.token_balance``).
        max_off_policy_iterations: batches generated ahead of the one that trains. 0: each is rolled out on demand.
        evaluation: see ``EvaluationData``.

    Raises (on ``setup``):
        DatasetError: a file is missing or wrong, or has fewer (short enough) questions than one iteration may need.
        ValueError: the number of ranks does not divide prompts_per_iteration.
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
        check_groups(group_size, dynamic_sampling)
        if (check := getattr(rollouts.sampler, "check_group", None)) is not None:
            check(group_size)
        if rollouts.program is not None:
            refuse_for_programs({"max_prompt_tokens": max_prompt_tokens})
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
        # Of the last iteration: tokens of the largest rank over the mean, before and after balancing, or None if not
        # done.
        self.token_imbalance: tuple[float, float] | None = None
        self.max_off_policy_iterations = max_off_policy_iterations
        self.generation_s: float | None = None  # seconds that generating the last batch took, hidden or not
        self._ahead = (
            RolloutsAhead(rollouts, self._roll_out_ahead, max_off_policy_iterations)
            if max_off_policy_iterations
            else None
        )
        # Of the last iteration, on this rank: (discarded groups, all groups). It is None without dynamic sampling.
        self.discarded_groups: tuple[int, int] | None = None
        self.discarded: list[Trajectory] = []  # of the last iteration, this rank's
        self._listeners: list[tuple[Callable[[Trajectory], None], Callable[[], None]]] = []
        self._guard = FailureGuard(self.max_infrastructure_failures, max_consecutive_failures)
        self._questions: list[Task] = []
        self._order: tuple[int, list[int]] = (-1, [])  # (pass, its permutation)

    @property
    def infrastructure_failures(self) -> float:
        """The share of the last iteration's trajectories, over all ranks, that failed because of infrastructure."""
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
            further += () if self.rollouts.guide is None else (self.rollouts.guide.share,)
            sampling = fingerprint(self.group_size, self.train_sampling, *further)
            self._loader = TrainLoader(self.iterations or self.iterations_per_pass, self._roll_out, data, sampling)
        super().setup(stage)
        if stage == "fit":
            self.start_rollouts()

    @property
    def iterations_per_pass(self) -> int:
        """The number of iterations in one pass over the training questions."""
        return len(self._questions) // self.prompts_per_iteration

    @property
    def training_questions(self) -> tuple[Task, ...]:
        """All loaded training questions as tasks, in the order of the files; empty before ``setup``."""
        return tuple(self._questions)

    def prompts(self, iteration: int) -> list[Task]:
        """Return the questions (tasks) of an iteration (from 0), over all ranks. The same at every call."""
        return [self._questions[i] for i in self._indices(iteration)]

    def further_prompts(self, iteration: int, attempt: int) -> list[Task]:
        """Return the questions that round ``attempt`` (from 0) of dynamic sampling offers, one per prompt of the
        iteration, over all ranks.

        They differ from those of the iteration and of its other rounds. Pure, as ``prompts``.
        """
        own = set(self._indices(iteration))
        order = permutation(len(self._questions), derive_seed(self.seed, "further", iteration))
        others = [i for i in order if i not in own]
        return [
            self._questions[i] for i in others[attempt * self.prompts_per_iteration :][: self.prompts_per_iteration]
        ]

    def listen(self, finished: Callable[[Trajectory], None], ended: Callable[[], None]) -> None:
        """Have ``finished`` called with each training trajectory as soon as it has finished, in the event loop of the
        rollout system, and ``ended`` when training has ended or failed. Neither is called where this rank may learn
        from other trajectories: with several ranks and ``balance_tokens``, or with ``dynamic_sampling``."""
        if (self.world_size == 1 or not self.balance_tokens) and self.dynamic_sampling is None:
            self._listeners.append((finished, ended))

    # ------------------------------------------------------------------------------------------------------------

    def _indices(self, iteration: int) -> list[int]:
        number, place = divmod(iteration, self.iterations_per_pass)
        if self._order[0] != number:
            seed = derive_seed(self.seed, "order", number)
            self._order = (number, permutation(len(self._questions), seed))
        return self._order[1][place * self.prompts_per_iteration : (place + 1) * self.prompts_per_iteration]

    def _check_sizes(self) -> None:
        files, needed = ", ".join(self.train_files), self.prompts_per_iteration * (1 + (self.dynamic_sampling or 0))
        if len(self._questions) < self.prompts_per_iteration:
            raise DatasetError(
                f"{files}: {len(self._questions)} questions, but one iteration takes "
                f"prompts_per_iteration = {self.prompts_per_iteration} different ones; lower it or give more questions"
            )
        if len(self._questions) < needed:
            raise DatasetError(
                f"{files}: {len(self._questions)} questions, but one iteration with dynamic_sampling = "
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
        """Generator that yields this rank's questions of each sampling round and receives their groups. Returns the
        kept groups, by position, and all groups.
        """
        # Each rank takes a block, because the position in the batch decides the optimiser step.
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
        """Roll out the questions and return one group of trajectories per question."""
        return self._by_group(self.rollouts.rollout(tasks, **self._how(iteration)))

    def _how(self, iteration: int) -> dict[str, Any]:
        # One seed for the whole iteration: requests derive theirs from the group.
        seed = derive_seed(self.seed, "train", iteration)
        how: dict[str, Any] = {"n": self.group_size, "sampling": self.train_sampling.params, "seed": seed}
        if self.rollouts.guide is not None:
            how["guided"] = self.rollouts.guide.share_at(iteration)
        if self._listeners:
            how["on_finished"] = self._tell
        return how

    def _tell(self, trajectory: Trajectory) -> None:
        for finished, _ in self._listeners:
            finished(trajectory)

    def _end_listening(self) -> None:
        for _, ended in self._listeners:
            ended()
        self._listeners.clear()

    def _by_group(self, trajectories: list[Trajectory]) -> Groups:
        n = self.group_size
        return [trajectories[i : i + n] for i in range(0, len(trajectories), n)]

    def _last_iteration(self) -> int | None:
        """Return the number of batches that training will ask for in all, or None if unknown. Later batches are not
        generated.
        """
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
        self._end_listening()
        super().teardown(stage)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        self._end_listening()
        super().close()


def differs(group: Sequence[Trajectory]) -> bool:
    """Return whether the rewards in a group of trajectories differ. Infrastructure failures do not count."""
    return len({t.reward.total for t in group if t.reward is not None and not t.left_out}) > 1
