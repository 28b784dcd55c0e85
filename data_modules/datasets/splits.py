"""Splits one set of questions into training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.ranges import BelowOne, NonNegativeInt
from common.seeds import derive_seed
from data_modules.datasets.files import DatasetError
from rollout.trajectory import Task

Part = Literal["train", "val", "test"]


@dataclass(frozen=True, slots=True)
class Splits:
    """Splits questions into training, validation and test by their text and the seed, independent of their place in the
    file. Questions with the same text stay together, so that a test question is never trained on.

    Args:
        val: share of the different questions, below 1; at least one question if above 0.
        test: the same for the test; the rest is for training.
        seed: of the draw.
        tested: the part that a test asks. ``make preconditions`` sets "train", so that its gates see no test question.

    Raises:
        ValueError: shares that leave nothing to train on.
    """

    val: BelowOne = 0.1
    test: BelowOne = 0.1
    seed: NonNegativeInt = 0
    tested: Part = "test"

    def __post_init__(self) -> None:
        if self.val + self.test >= 1:
            raise ValueError(
                f"splits: val is {self.val} and test {self.test}; expected shares that leave some to train"
            )

    def part(self, tasks: Sequence[Task], part: Part) -> list[Task]:
        """Return the tasks for training, validation or test, in order. Raises DatasetError if there are too few
        questions to split.
        """
        # By text, so that of two whose derived seeds were alike none would be lost.
        different = sorted({t.question for t in tasks}, key=lambda text: (derive_seed(self.seed, "split", text), text))
        test, val = (max(1, round(share * len(different))) if share else 0 for share in (self.test, self.val))
        if test + val >= len(different):
            raise DatasetError(
                f"{len(different)} different questions are too few to share: {test} to test, {val} to validate, "
                "nothing to train on; give more, or separate files and splits: null"
            )
        chosen = {"test": different[:test], "val": different[test : test + val], "train": different[test + val :]}
        wanted = set(chosen[self.tested if part == "test" else part])
        return [task for task in tasks if task.question in wanted]
