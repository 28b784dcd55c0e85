"""Stage: rolls a model out over questions and keeps the correct trajectories as demonstrations for a student.

Teacher-generated outputs, docs/algorithms/kd.md: only trajectories whose final answer is correct are kept, since
wrong ones teach wrong retrieval decisions. How many samples per question and which temperature the paper used is not
known.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from common.files import write_atomically
from common.progress_reports import ProgressReports
from common.ranges import NonNegativeInt, PositiveInt, UnitInterval
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError
from data_modules.datasets.question_file import OnInvalidRow
from data_modules.datasets.splits import Splits
from data_modules.evaluation_data import as_list, check_tasks
from data_modules.loading.decoding import UNCHANGED, Decoding
from data_modules.loading.failure_guard import FailureGuard
from data_modules.loading.loaders import run_seed
from data_modules.loading.question_loading import QuestionLoading
from rollout.protocols.base import PromptMode
from rollout.rewards.scoring import exact_match
from rollout.samplers.base import IndependentSampler
from rollout.storage import save_trajectories
from rollout.system import RolloutSystem
from rollout.trajectory import Task, Trajectory

logger = logging.getLogger(__name__)

RETRIES = 2  # of the questions that infrastructure failed, before they count as failed
COUNTS = ("questions", "generated", "failed", "correct", "kept", "tokens_generated", "tokens_kept")


class GenerateTrajectories:
    """Rolls a teacher out over questions and writes the correct trajectories (or all, see ``keep``), chunk by chunk. A
    run after a kill continues behind the finished chunks.

    The output folder gets ``trajectories/chunk-<n>.parquet`` (rollout.storage; no file for a chunk without kept
    trajectories), then ``progress/chunk-<n>.json``, which marks the chunk as done. Each generation needs a separate
    folder, as stages have.

    Args:
        rollouts: the teacher.
        files: question files (see datasets/questions.py).
        limit: at most this many questions, evenly spaced over the files. If kinds of questions alternate, a stride that
            shares a factor with their number leaves kinds out.
        samples_per_question: trajectories per question.
        sampling: decoding.
        gold_think: share of the questions that are asked with their gold passages shown, search off (ARCap's prompt
            "thinking"), for teachers that cannot read a passage they did not search for.
        gold_direct: share that must be answered from the gold passages at once (ARCap's prompt "source referencing").
        keep: "correct" keeps trajectories with exact match 1 or the environment's success; "all" keeps all but
            infrastructure failures.
        seed: of the sampling (None: the run's seed_everything).
        chunk_questions: questions per chunk; a kill loses at most one chunk.
        max_infrastructure_failures: share of a chunk that may fail by infrastructure ...
        max_consecutive_failures: ... before the stage stops, after this many such chunks in a row.
        columns: of question files of your own shape, see ``load_tasks``.
        splits: use only the training questions of ``files``, if validation and test share the files.
        on_invalid_row: ``drop`` leaves out rows that cannot be used, and logs them; ``refuse`` stops.
    """

    def __init__(
        self,
        rollouts: RolloutSystem,
        files: Sequence[str],
        limit: PositiveInt | None = None,
        samples_per_question: PositiveInt = 1,
        sampling: Decoding = UNCHANGED,
        gold_think: UnitInterval = 0.0,
        gold_direct: UnitInterval = 0.0,
        keep: Literal["correct", "all"] = "correct",
        seed: NonNegativeInt | None = None,
        chunk_questions: PositiveInt = 512,
        max_infrastructure_failures: UnitInterval = 0.2,
        max_consecutive_failures: PositiveInt = 1,
        columns: dict[str, str] | None = None,
        splits: Splits | None = None,
        on_invalid_row: OnInvalidRow = "refuse",
    ) -> None:
        if gold_think + gold_direct > 1:
            raise ValueError(f"gold_think {gold_think} and gold_direct {gold_direct} are shares of one whole")
        self.rollouts = rollouts
        self.files = as_list("files", files)
        self.limit = limit
        self.samples_per_question = samples_per_question
        self.sampling = sampling
        self.gold_shares = {PromptMode.GOLD_THINK: gold_think, PromptMode.GOLD_DIRECT: gold_direct}
        self.keep = keep
        self._seed = seed
        self.questions = QuestionLoading(
            rollouts.protocol,
            on_invalid_row=on_invalid_row,
            answers=rollouts.needs_answers,
            columns=columns,
            splits=splits,
        )
        self.chunk_questions = chunk_questions
        self._guard = FailureGuard(max_infrastructure_failures, max_consecutive_failures)

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Generate the chunks of trajectories that are missing, and return a summary of all chunks: counts
        (``failed``: trajectories that infrastructure failed in every attempt), ``lost`` (ids of their questions),
        ``correct_share``, ``mean_response_tokens`` and ``mean_response_tokens_kept`` (sampled tokens), ``kept/<data
        source>`` and ``seconds``.

        Raises:
            DatasetError: a question file is wrong, or no trajectory was kept.
            TooManyFailuresError: see max_infrastructure_failures; finished chunks stay.
        """
        output_dir = Path(output_dir)
        tasks = self.questions.read(self.files)
        tasks = self.questions.select(tasks, ", ".join(self.files), self.limit, self.rollouts.first_prompts())
        check_tasks(self.rollouts, tasks)
        starts = range(0, len(tasks), self.chunk_questions)
        chunks = [tasks[i : i + self.chunk_questions] for i in starts]
        done = [self._done(output_dir, number) for number in range(len(chunks))]
        if all(done):
            return self._summary(done)
        try:
            self.rollouts.start()
            reports = ProgressReports()
            reports.begin("generate", sum(1 for record in done if record) / len(chunks))
            for number, chunk in enumerate(chunks):
                expected, shares = len(chunk) * self.samples_per_question, self._shares(done)

                def show(
                    finished: int, number: int = number, expected: int = expected, shares: list[str] = shares
                ) -> None:
                    reports.report("generate", (number + min(finished / expected, 0.99)) / len(chunks), shares)

                done[number] = done[number] or self._chunk(output_dir, number, chunk, show)
            reports.report("generate", 1.0, self._shares(done))
        finally:
            self.rollouts.close()
        return self._summary(done)

    # ------------------------------------------------------------------------------------------------------------

    def _done(self, output_dir: Path, number: int) -> dict[str, Any]:
        """Return the counts of a finished chunk of questions; {} if the chunk is not finished."""
        path = output_dir / "progress" / f"chunk-{number:05d}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _chunk(self, output_dir: Path, number: int, tasks: list[Task], show: Callable[[int], None]) -> dict[str, Any]:
        start = time.monotonic()
        # Not the chunk's number: requests derive theirs from the question's id.
        seed = derive_seed(run_seed(self._seed), "generate")
        trajectories: list[Trajectory] = []
        for mode, asked in self._by_mode(tasks, seed).items():
            before = len(trajectories)
            trajectories += self._roll_out(asked, seed, mode, lambda n, _, before=before: show(before + n))
        self._guard.check(trajectories, f"generation, chunk {number + 1}", self.rollouts.failures)
        usable = [t for t in trajectories if not t.left_out]
        correct = [t for t in usable if is_right(t)]
        kept = correct if self.keep == "correct" else usable
        if kept:
            save_trajectories(output_dir / "trajectories" / f"chunk-{number:05d}.parquet", kept)
        counts = (len(tasks), len(trajectories), len(trajectories) - len(usable), len(correct), len(kept))
        record: dict[str, Any] = dict(zip(COUNTS, (*counts, _sampled(usable), _sampled(kept)), strict=True))
        record["lost"] = sorted({t.group for t in trajectories if t.left_out})
        if record["lost"]:
            logger.warning(
                "chunk %d: infrastructure failed %d trajectories in all of %d attempts; lost of the questions %s",
                number + 1, record["failed"], 1 + RETRIES, ", ".join(record["lost"]),
            )  # fmt: skip
        record["by_source"] = Counter(t.task.data_source for t in kept)
        record["seconds"] = time.monotonic() - start
        write_atomically(output_dir / "progress" / f"chunk-{number:05d}.json", json.dumps(record, indent=2) + "\n")
        return record

    def _roll_out(
        self, tasks: list[Task], seed: int, mode: PromptMode, on_progress: Callable[[int, int], None]
    ) -> list[Trajectory]:
        """Return trajectories of all tasks. A question with trajectories that infrastructure failed is rolled out
        again, with the same seeds, up to RETRIES times, and these trajectories are replaced.
        """

        def attempt(asked: list[Task], on_progress: Callable[[int, int], None] | None = None) -> list[Trajectory]:
            return self.rollouts.rollout(
                asked, n=self.samples_per_question, sampling=self.sampling.params, seed=seed, mode=mode,
                on_progress=on_progress, sampler=IndependentSampler(),  # a retry replaces single trajectories
            )  # fmt: skip

        trajectories = attempt(tasks, on_progress)
        for _ in range(RETRIES):
            failed = {t.task.id for t in trajectories if t.left_out}
            if not failed:
                break
            logger.warning(
                "%d questions have trajectories that failed by infrastructure or have no reward; trying them again",
                len(failed),
            )
            again = {(t.group, t.index): t for t in attempt([task for task in tasks if task.id in failed])}
            trajectories = [again[t.group, t.index] if t.left_out else t for t in trajectories]
        return trajectories

    def _by_mode(self, tasks: list[Task], seed: int) -> dict[PromptMode, list[Task]]:
        """Return the questions by prompt mode, which is chosen by each question's id. Questions without gold passages
        use the search loop.
        """
        parts: dict[PromptMode, list[Task]] = {PromptMode.AGENT: []}
        for task in tasks:
            draw = derive_seed(seed, "mode", task.id) % 10_000 / 10_000
            mode = PromptMode.AGENT
            for gold, share in self.gold_shares.items():
                if task.gold_passages and mode is PromptMode.AGENT:
                    mode = gold if draw < share else mode
                    draw -= share
            parts.setdefault(mode, []).append(task)
        return {mode: asked for mode, asked in parts.items() if asked}

    def _shares(self, done: Sequence[dict[str, Any]]) -> list[str]:
        total = {name: sum(record.get(name, 0) for record in done) for name in COUNTS}
        usable = max(total["generated"] - total["failed"], 1)
        return [f"correct {total['correct'] / usable:.3f}", f"kept {total['kept']:,}"]

    def _summary(self, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
        summary: dict[str, Any] = {name: sum(record[name] for record in done) for name in COUNTS}
        usable = summary["generated"] - summary["failed"]
        summary["correct_share"] = summary["correct"] / usable if usable else None
        summary["mean_response_tokens"] = summary["tokens_generated"] / usable if usable else None
        summary["mean_response_tokens_kept"] = summary["tokens_kept"] / summary["kept"] if summary["kept"] else None
        summary["lost"] = [question for record in done for question in record.get("lost", [])]
        by_source = sum((Counter(record["by_source"]) for record in done), Counter())
        summary |= {f"kept/{source}": count for source, count in sorted(by_source.items())}
        summary["seconds"] = sum(record["seconds"] for record in done)
        logger.info("generated trajectories: %s", summary)
        if not summary["kept"]:
            raise DatasetError(
                f"none of {usable} trajectories over {summary['questions']} questions was kept (keep: {self.keep}): "
                "the model answered none of them correctly. Train it further, or give it other questions"
            )
        return summary


def _sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(sum(t.loss_mask) for t in trajectories)


def is_right(trajectory: Trajectory) -> bool:
    """Return whether a trajectory is correct: the environment's success if it scores itself, else the answer's exact
    match.
    """
    success = None if trajectory.reward is None else trajectory.reward.parts.get("success")
    return (
        success == 1.0 if success is not None else bool(exact_match(trajectory.answer, trajectory.task.golden_answers))
    )
