"""Base of the stages that generate a world: question files, a tokenizer and text to learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from data_modules.datasets.questions import write_tasks
from rollout.trajectory import Task


class WorldTask(ABC):
    """Base class of the stages that generate a world (invented tasks): question files, a tokenizer and texts to learn
    from. Deterministic; the splits are disjoint.

    Args:
        seed: seed of all draws.
        train: number of training tasks.
        val: number of validation tasks.
        test: number of test tasks.
        demonstrations: number of tasks for the expert.
        vocab_size: vocabulary size of the tokenizer.
        articles: number of plain-text sequences that teach a model the language.
        article_tokens: tokens per sequence.
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
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the question files, the tokenizer and, for worlds with text, ``articles.parquet`` to ``output_dir``.
        The question files are ``{demonstrations,train,val,test}.parquet``. Returns counts.
        """
        splits = self._splits()
        figures = write_splits(output_dir, splits, self._prompt)
        return {"vocabulary": self._write_language(output_dir, splits["demonstrations"])} | figures

    @abstractmethod
    def _splits(self) -> dict[str, list[Task]]:
        """Return the tasks by the name of their question file, in the requested sizes."""

    @abstractmethod
    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        """Write ``tokenizer/`` and, for worlds with text, ``articles.parquet`` to ``folder``. Return the vocabulary
        size.
        """

    def _prompt(self, task: Task) -> str:
        """Return the prompt text of a task for the question file."""
        return task.question


def write_splits(
    folder: Path, splits: Mapping[str, Sequence[Task]], render: Callable[[Task], str] = lambda task: task.question
) -> dict[str, int]:
    """Write the question file ``NAME.parquet`` of each split to ``folder``. Return the sizes of the splits and of each
    data source of "train".

    Args:
        render: returns the prompt text of a task, as in ``write_tasks``.
    """
    for name, tasks in splits.items():
        write_tasks(folder / f"{name}.parquet", tasks, render)
    sources = Counter(task.data_source for task in splits["train"])
    return {name: len(tasks) for name, tasks in splits.items()} | dict(sources)
