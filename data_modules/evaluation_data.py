"""Base class of all data modules: loaders of validation and test, which roll out with the current weights."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L

from common.ranges import NonNegativeInt, PositiveInt, UnitInterval
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError, spread
from data_modules.datasets.question_file import OnInvalidRow
from data_modules.datasets.splits import Splits
from data_modules.loading.decoding import GREEDY, Decoding
from data_modules.loading.failure_guard import FailureGuard
from data_modules.loading.loaders import EvaluationLoader, run_seed
from data_modules.loading.question_loading import Prompts, QuestionLoading
from rollout.protocols.base import PromptMode
from rollout.samplers.base import IndependentSampler, Sampler
from rollout.system import RolloutSystem
from rollout.trajectory import Task, Trajectory

DiagnosticPrompt = Literal["gold_direct", "gold_think", "closed_book"]
Split = Literal["val", "test"]
NEED_GOLD = (PromptMode.GOLD_DIRECT, PromptMode.GOLD_THINK)


def check_tasks(rollouts: RolloutSystem, tasks: Sequence[Task], *, inject_skills: bool = True) -> None:
    """Raise DatasetError for tasks that the environment cannot play. With ``inject_skills``, also for tasks that the
    skills (advice texts) do not cover.
    """
    try:
        if inject_skills and rollouts.skills is not None:
            rollouts.skills.check_tasks(tasks)
        if callable(check := getattr(rollouts.environment, "check", None)):
            check(tasks)
    except ValueError as error:
        raise DatasetError(str(error)) from error


def refuse_for_programs(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that read or write prompts, which a program writes itself."""
    if names := [name for name, value in options.items() if value]:
        raise ValueError(f"data has {', '.join(names)}, but rollouts.program writes the prompts; leave it out")


def as_list(name: str, paths: Sequence[str]) -> list[str]:
    """Return the paths as a list. Raises ValueError for a single path, which would be read letter by letter."""
    if isinstance(paths, str):
        raise ValueError(f"{name} is the single path {paths!r}; expected a list: [{paths}]")
    return list(paths)


class EvaluationData(L.LightningDataModule):
    """Lightning data module that loads validation and test questions and rolls them out. The first loader runs the
    normal search loop over all questions; each diagnostic prompt adds one loader.

    Every batch is a ``list[Trajectory]``; ``prompt_modes(split)`` names each dataloader. Every row occurs once, on any
    number of ranks. The rollout system starts once, stays up between ``fit`` and ``test``, and is closed after test or
    validate, on an exception, or when the process ends.

    Args:
        rollouts: rolls questions out, or None without val_files and test_files.
        val_files: question files (see datasets/questions.py) of validation.
        test_files: question files of the test; also evaluation sets by name, as "gsm8k:data/gsm8k.jsonl".
        eval_sampling: decoding of validation, test and diagnostic prompts; greedy by default.
        val_sampling: another decoding for validation; null: ``eval_sampling``.
        eval_batch: questions per batch on each rank; changes speed only.
        attempts: trajectories per question in the test's search loop, each sampled independently (without branching),
            for pass@k and for intervals that include the spread of answers. Validation and diagnostic prompts take one.
        max_val: use at most this many validation questions, evenly spaced over the files.
        max_test: the same for test.
        diagnostic_prompts: ARCap's diagnostic prompts, in the test only. gold_direct and gold_think ask the questions
            that have gold passages, closed_book asks all.
        max_diagnostic_prompts: at most this many questions per diagnostic prompt, evenly spaced.
        max_infrastructure_failures: share of an evaluation batch that may fail by infrastructure. Above it the run
            stops, because a metric over the rest would mislead.
        seed: of evaluation sampling (None: the run's seed_everything).
        prompts: ``as_given``, or ``tool_reasoning``: SOD's wording of every question, also in training, by data source
            (datasets/tool_prompts.py), for a protocol with template ``dataset``; ``tool_reasoning_first_row``: as
            released, every row of a file in the wording of its first row.
        lcb_examples: with ``tool_reasoning``, show at most this many of LiveCodeBench's public tests as examples; null:
            all its tests, as released, including those that score the answer.
        max_eval_prompt_tokens: leave out validation and test questions with longer prompts (chat template and tools
            counted); the log counts them. By default all questions stay. Questions whose prompts leave no token of
            ``max_length`` are logged, not sampled, and count as unanswered.
        on_invalid_row: of question files, also in training: ``refuse`` stops at rows that cannot be used, ``drop``
            leaves them out; the message or the log counts them by fault.
        eval_skills: whether validation and test show the rollout system's skills; false tests what Skill-GRPO has
            learnt without them.
        columns: for question files of your own shape, our columns by the file's names; see ``load_tasks``.
        splits: train_files, val_files and test_files are the same files, and each part takes its share of questions.
    """

    def __init__(
        self,
        rollouts: RolloutSystem | None = None,
        val_files: Sequence[str] = (),
        test_files: Sequence[str] = (),
        eval_sampling: Decoding = GREEDY,
        eval_batch: PositiveInt = 256,
        attempts: PositiveInt = 1,
        max_val: PositiveInt | None = None,
        max_test: PositiveInt | None = None,
        diagnostic_prompts: Sequence[DiagnosticPrompt] = (),
        max_diagnostic_prompts: PositiveInt | None = None,
        max_infrastructure_failures: UnitInterval = 0.2,
        seed: NonNegativeInt | None = None,
        prompts: Prompts = "as_given",
        lcb_examples: NonNegativeInt | None = 2,
        max_eval_prompt_tokens: PositiveInt | None = None,
        on_invalid_row: OnInvalidRow = "refuse",
        eval_skills: bool = True,
        columns: dict[str, str] | None = None,
        splits: Splits | None = None,
        val_sampling: Decoding | None = None,
    ) -> None:
        super().__init__()
        if rollouts is None and (val_files or test_files):
            raise ValueError("val_files and test_files are evaluated by rollouts; give `rollouts` too, or neither")
        if attempts > 1 and eval_sampling.temperature == 0:
            raise ValueError(
                f"attempts is {attempts}, but eval_sampling is greedy (temperature 0), so that all attempts would be "
                "the same; give eval_sampling a temperature, or leave attempts at 1"
            )
        if len(set(diagnostic_prompts)) != len(diagnostic_prompts):
            raise ValueError(f"diagnostic_prompts has the same name twice: {', '.join(diagnostic_prompts)}")
        if rollouts is not None and rollouts.program is not None:
            refused = {"diagnostic_prompts": diagnostic_prompts, "max_eval_prompt_tokens": max_eval_prompt_tokens}
            refuse_for_programs(refused)
        self.rollouts = rollouts
        protocol = None if rollouts is None else rollouts.protocol
        answers = rollouts is None or rollouts.needs_answers
        self.questions = QuestionLoading(protocol, prompts, lcb_examples, on_invalid_row, answers, columns, splits)
        self.max_eval_prompt_tokens = max_eval_prompt_tokens
        self.files = {"val": as_list("val_files", val_files), "test": as_list("test_files", test_files)}
        self.check_shared(self.files["val"], self.files["test"])
        self.limits = {"val": max_val, "test": max_test}
        self.eval_sampling, self.eval_skills = eval_sampling, eval_skills
        self.val_sampling = eval_sampling if val_sampling is None else val_sampling
        self.eval_batch = eval_batch
        self.attempts = attempts
        self.diagnostic_prompts = tuple(PromptMode(name) for name in diagnostic_prompts)
        self.max_diagnostic_prompts = max_diagnostic_prompts
        self.max_infrastructure_failures = max_infrastructure_failures
        self._eval_guard = FailureGuard(max_infrastructure_failures)
        self._seed = seed
        self._tasks: dict[str, list[Task]] = {}
        self._running = False

    # --- for callbacks ------------------------------------------------------------------------------------------

    def prompt_modes(self, split: Split) -> list[str]:
        """Return the ``PromptMode`` value of each dataloader of a split ("val" or "test"): "agent" for rollouts with
        search, the others for diagnostics."""
        if not self.files[split]:
            return []
        return [PromptMode.AGENT.value, *(mode.value for mode in self._diagnostics(split))]

    @property
    def seed(self) -> int:
        return run_seed(self._seed)

    @property
    def rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read the question files that this stage needs, and start the rollout system if there are questions to roll
        out. The stage "fit" also reads the test files, to check them.

        Raises:
            DatasetError: a file is missing or wrong, a gold prompt finds no question with gold passages, or no
                prompt is short enough.
        """
        splits: dict[str, tuple[Split, ...]] = {"fit": ("val",), "validate": ("val",), "test": ("test",)}
        # A fit ends with its test: check the test's files and diagnostic prompts now, not after days.
        for split in ("val", "test") if stage == "fit" else splits.get(stage, ()):
            if self.files[split] and split not in self._tasks:
                assert self.rollouts is not None, "files need rollouts, see __init__"
                writer = self.rollouts.first_prompts(inject_skills=self.eval_skills, test=split == "test")
                tasks, where = self.questions.read(self.files[split]), ", ".join(self.files[split])
                self._tasks[split] = self.questions.select(
                    tasks, where, self.limits[split], writer, self.max_eval_prompt_tokens, part=split
                )
                self.check_tasks(self._tasks[split], inject_skills=self.eval_skills)
                for mode in self._diagnostics(split):
                    self._diagnostic_tasks(split, mode)
        if stage == "fit":
            self.ask_module()
        if any(self._tasks.get(split) for split in splits.get(stage, ())):
            self.start_rollouts()

    def val_dataloader(self) -> list[EvaluationLoader]:
        return self._loaders("val")

    def test_dataloader(self) -> list[EvaluationLoader]:
        return self._loaders("test")

    def teardown(self, stage: str) -> None:
        if stage != "fit":  # after fit the same process tests, with the same engine
            self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()

    def ask_module(self) -> None:
        """Ask the module and the callbacks (``accept_data``) whether they refuse this data, before an engine loads a
        model. Lightning calls their ``setup`` later.
        """
        for part in (getattr(self.trainer, "lightning_module", None), *getattr(self.trainer, "callbacks", ())):
            accept = getattr(part, "accept_data", None)
            if accept is not None:
                accept(self)

    def start_rollouts(self) -> None:
        """Start the rollout system. Idempotent."""
        if not self._running and self.rollouts is not None:
            self._running = True
            atexit.register(self.close)
            self.rollouts.start()

    def check_shared(self, *files: list[str]) -> None:
        """Raise ValueError if training, validation and test name different files although ``splits`` divides one set of
        files among them.
        """
        if self.questions.splits is not None and len({tuple(paths) for paths in files if paths}) > 1:
            raise ValueError(
                "splits shares one set of files out among training, validation and test, but they have different ones: "
                + ", ".join(str(paths) for paths in files) + "; give the same files, or splits: null"
            )  # fmt: skip

    def check_tasks(self, tasks: Sequence[Task], *, inject_skills: bool = True) -> None:
        """Raise DatasetError for tasks that cannot be rolled out, before a model loads."""
        if self.rollouts is not None:
            check_tasks(self.rollouts, tasks, inject_skills=inject_skills)

    def close(self) -> None:
        """Stop the rollout system. Idempotent."""
        if self._running and self.rollouts is not None:
            self._running = False
            atexit.unregister(self.close)
            self.rollouts.close()

    # --- making loaders -----------------------------------------------------------------------------------------

    def _diagnostics(self, split: Split) -> tuple[PromptMode, ...]:
        return self.diagnostic_prompts if split == "test" else ()

    def _diagnostic_tasks(self, split: Split, mode: PromptMode) -> list[Task]:
        tasks = [t for t in self._tasks[split] if t.gold_passages or mode not in NEED_GOLD]
        if not tasks:
            raise DatasetError(
                f"diagnostic prompt '{mode.value}' needs questions with gold passages, but none of the "
                f"{len(self._tasks[split])} {split} questions in {', '.join(self.files[split])} has any; add a "
                "gold_passages column or leave the diagnostic prompt out"
            )
        return spread(tasks, self.max_diagnostic_prompts)

    def _loaders(self, split: Split) -> list[EvaluationLoader]:
        if split not in self._tasks:
            warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")  # it is meant
            return []

        def rollout(tasks: list[Task], mode: PromptMode) -> list[Trajectory]:
            return self._evaluate(split, tasks, mode)

        chosen = [(PromptMode.AGENT, self._tasks[split])]
        chosen += [(mode, self._diagnostic_tasks(split, mode)) for mode in self._diagnostics(split)]
        ours = (self.eval_batch, rollout, self.rank, self.world_size)
        return [EvaluationLoader(tasks, mode, *ours) for mode, tasks in chosen]

    def sample(
        self,
        split: str,
        tasks: Sequence[Task],
        what: str,
        sampler: Sampler | None = None,
        *,
        inject_skills: bool | None = None,
    ) -> list[Trajectory]:
        """Roll out each of this rank's ``tasks`` once, for callbacks, and return the trajectories. Uses the sampling
        options of the split and a separate seed.

        Infrastructure failures are left out. A collective: every rank calls it, even without tasks.

        Args:
            split: the split whose sampling is used.
            tasks: of this rank.
            what: name of the rollouts, for the message of too many failures; also decides the seed.
            sampler: by default an independent sampler, whatever training uses.
            inject_skills: put the system's skills, if any, into the prompts; by default as the evaluation does.

        Raises:
            TooManyFailuresError: see ``max_infrastructure_failures``.
        """
        inject_skills = self.eval_skills if inject_skills is None else inject_skills
        sampled = self._rollout(split, tasks, what, sampler, inject_skills=inject_skills, test=split == "test")
        return [t for t in sampled if not t.left_out]

    def _evaluate(self, split: Split, tasks: list[Task], mode: PromptMode) -> list[Trajectory]:
        agent = split == "test" and mode is PromptMode.AGENT
        attempts = self.attempts if agent else 1
        # One seed for the whole split: requests derive theirs from the task's id (and the attempt), so batches do
        # not matter. Each attempt is a separate group, because members of one group may be branches of each other.
        trajectories = self._rollout(
            split,
            [task for task in tasks for _ in range(attempts)],
            mode.value,
            mode=mode,
            on_progress=getattr(getattr(self.trainer, "progress_bar_callback", None), "rolled_out", None),
            inject_skills=self.eval_skills,
            test=agent,
        )
        return [t.replace(index=i % attempts) for i, t in enumerate(trajectories)]

    def _rollout(
        self, split: str, tasks: Sequence[Task], what: str, sampler: Sampler | None = None, **options: Any
    ) -> list[Trajectory]:
        rollouts = self.rollouts
        assert rollouts is not None, "files need rollouts, see __init__"
        trajectories: list[Trajectory] = []
        if tasks:
            trajectories = rollouts.rollout(
                tasks,
                n=1,
                sampling=(self.val_sampling if split == "val" else self.eval_sampling).params,
                seed=derive_seed(self.seed, split, what),
                sampler=sampler or IndependentSampler(),  # whatever the training's does with a group
                **options,
            )
        self._eval_guard.check(trajectories, f"{split} ({what})", rollouts.failures)
        return trajectories
