"""Tasks of environments that draw an episode from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.ranges import PositiveInt
from data_modules.datasets.questions import write_tasks
from rollout.trajectory import Task

HELD_OUT = 1_000_000  # distance between the seeds of splits


class SeedTasks:
    """Stage that writes ``<split>.parquet`` for train, val and test: a task for each seed, in ``metadata["seed"]``. No
    seed occurs in two splits.

    Args:
        name: the question, replaced by the environment's first observation, and the data source.
        train, val, test: number of tasks.
        options: further options of a reset, in ``metadata["options"]``.
    """

    def __init__(
        self,
        name: str,
        train: PositiveInt = 1000,
        val: PositiveInt = 50,
        test: PositiveInt = 200,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.options = name, options
        self.sizes = {"train": train, "val": val, "test": test}

    def run(self, output_dir: Path) -> dict[str, int]:
        """Write the files and return the number of tasks of each split."""
        for number, (split, size) in enumerate(self.sizes.items()):
            tasks = []
            for index in range(size):
                metadata: dict[str, Any] = {"seed": number * HELD_OUT + index}
                if self.options:
                    metadata["options"] = self.options
                tasks.append(Task(f"{split}-{index}", self.name, (), self.name, metadata=metadata))
            write_tasks(Path(output_dir) / f"{split}.parquet", tasks)
        return self.sizes
