"""Tasks of the tasksets of verifiers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.ranges import PositiveInt
from data_modules.datasets.questions import write_tasks
from rollout.programs.verifiers_program import INDEX, NULL_AGENT, VerifiersWorker, configuration
from rollout.trajectory import Task


class VerifiersTasks:
    """Stage that writes ``<split>.parquet`` for train, val and test, for ``VerifiersProgram``. The taskset's first
    tasks are the test's, the next ones val's, then train's.

    Args:
        taskset: configuration of the taskset, with its ``id``.
        train, val, test: number of tasks.
        folders: folders on the import path of the taskset.
        python: the Python of verifiers.
    """

    def __init__(
        self,
        taskset: dict[str, Any],
        train: PositiveInt = 1000,
        val: PositiveInt = 50,
        test: PositiveInt = 200,
        folders: Sequence[str] = (),
        python: str = ".venv-verifiers/bin/python",
    ) -> None:
        self._config = configuration(taskset, python) | NULL_AGENT
        self._python, self._folders = python, folders
        self.sizes = {"test": test, "val": val, "train": train}

    def run(self, output_dir: Path) -> dict[str, int]:
        """Write the files and return the number of tasks of each split. Raises ValueError if the taskset has too
        few."""
        wanted = sum(self.sizes.values())
        found = asyncio.run(self._first(wanted))
        if len(found) < wanted:
            raise ValueError(f"the taskset has {len(found)} tasks; expected {wanted} (train, val and test together)")
        source = self._config["taskset"]["id"]
        tasks = (Task(str(i), text, (), source, metadata={INDEX: i}) for i, text in enumerate(found))
        for split, size in self.sizes.items():
            write_tasks(
                Path(output_dir) / f"{split}.parquet", itertools.islice(tasks, size), lambda task: task.question
            )
        return self.sizes

    async def _first(self, count: int) -> list[str]:
        worker = VerifiersWorker(self._python, self._config, self._folders)
        try:
            return (await worker.ask(ask="tasks", count=count))["prompts"]
        finally:
            await worker.close()
