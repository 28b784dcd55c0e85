"""Base of the stages that generate a world: question files, a tokenizer, and text to learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from common.validation import check_at_least_one
from data_modules.datasets.questions import write_tasks
from rollout.trajectory import Task


class WorldTask(ABC):
    """Deterministic. All splits are disjoint.

    Args:
        seed: of everything.
        train: training tasks.
        val: validation tasks.
        test: test tasks.
        demonstrations: tasks for the expert.
        vocab_size: of the tokenizer.
        articles: sequences of plain text, to teach a model the language.
        article_tokens: length of each.
    """

    def __init__(
        self,
        seed: NonNegativeInt = 0,
        train: PositiveInt = 4000,
        val: PositiveInt = 100,
        test: PositiveInt = 200,
        demonstrations: PositiveInt = 4000,
        vocab_size: PositiveInt = 1024,
        articles: PositiveInt = 6000,
        article_tokens: PositiveInt = 160,
    ) -> None:
        self.seed = seed
        self.sizes = {"demonstrations": demonstrations, "train": train, "val": val, "test": test}
        check_at_least_one(**self.sizes)
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write ``{demonstrations,train,val,test}.parquet``, ``tokenizer/``, ``articles.parquet`` (if it has text)."""
        splits = self._splits()
        figures = write_splits(output_dir, splits, self._prompt)
        return {"vocabulary": self._write_language(output_dir, splits["demonstrations"])} | figures

    @abstractmethod
    def _splits(self) -> dict[str, list[Task]]:
        """Tasks by the name of their file, of the sizes that were asked for."""

    @abstractmethod
    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        """Write ``tokenizer/``, and ``articles.parquet`` if it has text. Returns the size of the vocabulary."""

    def _prompt(self, task: Task) -> str:
        """Text of the task's prompt in its file."""
        return task.question


def write_splits(
    folder: Path, splits: Mapping[str, Sequence[Task]], render: Callable[[Task], str] = lambda task: task.question
) -> dict[str, int]:
    """Write ``NAME.parquet`` for each split. Returns their sizes, and those of the data sources of "train".

    Args:
        render: text of a task's prompt, as in ``write_tasks``.
    """
    for name, tasks in splits.items():
        write_tasks(folder / f"{name}.parquet", tasks, render)
    sources = Counter(task.data_source for task in splits["train"])
    return {name: len(tasks) for name, tasks in splits.items()} | dict(sources)
