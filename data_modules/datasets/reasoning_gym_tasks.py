"""Tasks of reasoning-gym's procedural data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from data_modules.datasets.questions import write_tasks
from rollout.rewards.procedural import KEY, dataset
from rollout.trajectory import Task


class ReasoningGymTasks:
    """Stage that writes ``<split>.parquet`` for train, val and test, in equal parts from several data sets of
    reasoning-gym. ``rollout.rewards.procedural.ReasoningGymReward`` scores them.

    A question of the test is in no other split, and one of val is not in train: repeated ones are left out, so that a
    data set with few different questions gives fewer tasks.

    Args:
        datasets: options of each data set, by its name in reasoning-gym.
        train, val, test: number of tasks of all data sets together.
        seed: of the data sets.

    Raises:
        ValueError: an unknown data set or option, or a split without a task.
    """

    def __init__(
        self,
        datasets: dict[str, dict[str, Any]],
        train: PositiveInt = 1000,
        val: PositiveInt = 100,
        test: PositiveInt = 200,
        seed: NonNegativeInt = 0,
    ) -> None:
        self.sizes = {"test": test, "val": val, "train": train}
        count = sum(_share(size, len(datasets)) for size in self.sizes.values())
        self._made = {
            name: (about := {"dataset": name, "options": options or {}, "seed": seed, "size": count}, dataset(**about))
            for name, options in datasets.items()
        }

    def run(self, output_dir: Path) -> dict[str, int]:
        """Write the files and return the number of tasks of each split."""
        splits: dict[str, list[Task]] = {split: [] for split in self.sizes}
        for name, (about, made) in self._made.items():
            asked: set[str] = set()
            index = 0
            for split, size in self.sizes.items():
                before = set(asked)
                for _ in range(_share(size, len(self._made))):
                    entry = made[index]
                    if entry["question"] not in before:
                        asked.add(entry["question"])
                        metadata = {KEY: about | {"index": index}}
                        gold = (str(entry["answer"]),) if entry["answer"] is not None else ()
                        splits[split].append(Task(f"{name}-{index}", entry["question"], gold, name, metadata=metadata))
                    index += 1
        if empty := [split for split, tasks in splits.items() if not tasks]:
            raise ValueError(f"no question of {', '.join(self._made)} is left for {', '.join(empty)}")
        for split, tasks in splits.items():
            write_tasks(Path(output_dir) / f"{split}.parquet", tasks, lambda task: task.question)
        return {split: len(tasks) for split, tasks in splits.items()}


def _share(size: int, parts: int) -> int:
    return -(-size // parts)
