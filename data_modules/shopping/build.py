"""The first stages of the shopping experiments: goals as question files, the catalogue they are of, and its texts."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from data_modules.datasets.questions import write_tasks
from data_modules.shopping.texts import label, visited
from data_modules.world_language import Draw, mixed_text, write_language
from rollout.environments.shopping.catalogue import Catalogue, load_catalogue, write_catalogue
from rollout.environments.shopping.generate import generate_catalogue
from rollout.environments.shopping.goals import Goal, as_task, make_goals, split_goals
from rollout.environments.shopping.search_index import write_corpus
from rollout.skills.bank import SkillBank
from rollout.skills.reading import read_bank
from rollout.trajectory import Task

DIGITS = 2  # of a number that stay together: a product's number is two tokens to copy


class ShopTask(ABC):
    """What the tasks that write a shop have in common."""

    @abstractmethod
    def catalogue(self) -> Catalogue: ...

    @abstractmethod
    def splits(self, catalogue: Catalogue) -> Mapping[str, Sequence[Task]]:
        """Tasks by the name of their file."""

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write ``catalogue.jsonl`` (of ``environment.catalogue``), ``corpus.jsonl`` (for the index stage) and one
        ``.parquet`` for every split.

        Raises:
            CatalogueError: see ``load_catalogue``.
            ValueError: too few goals for the splits.
        """
        catalogue = self.catalogue()
        splits = self.splits(catalogue)
        write_catalogue(catalogue, output_dir / "catalogue.jsonl")
        write_corpus(catalogue, output_dir / "corpus.jsonl")
        for name, tasks in splits.items():
            write_tasks(output_dir / f"{name}.parquet", tasks, render=lambda task: task.question)
        categories = Counter(task.data_source for task in splits["train"])
        return {"products": len(catalogue)} | {name: len(tasks) for name, tasks in splits.items()} | dict(categories)


class ListWebShop(ShopTask):
    """WebShop's published products and goals, split as verl-agent and SDAR split them: of the shuffled list the first
    500 are the test, the others are trained on. Deterministic.

    The released evaluation draws 128 of the 500 anew each time (specs/sdar.md 3.6); here they are drawn once, for
    validation, and the test asks all 500. Panel and test are of the same goals: choose no checkpoint by the panel.

    Args:
        items: WebShop's ``items_shuffle_1000.json`` (published: ``use_small``), or ``items_shuffle.json``.
        attributes: ``items_ins_v2_1000.json``, or ``items_ins_v2.json``; holds the synthetic instructions.
        human: ``items_human_ins.json``; the goals are then what people wrote (published: the synthetic ones).
        products: the first so many items; None for all of the file.
        seed: of price limits, of prices with a range, and of the panel.
        evaluation: goals of the test.
        panel: of these, for validation.
    """

    def __init__(
        self,
        items: str,
        attributes: str,
        human: Optional[str] = None,
        products: Optional[int] = None,
        seed: int = 0,
        evaluation: int = 500,
        panel: int = 128,
    ) -> None:
        if not 1 <= panel <= evaluation:
            raise ValueError(f"panel is {panel}; expected 1 to evaluation = {evaluation}, of which it is a part")
        self.files = {"path": items, "attributes": attributes, "human": human}
        self.products, self.seed = products, seed
        self.evaluation, self.panel = evaluation, panel

    def catalogue(self) -> Catalogue:
        return load_catalogue(**self.files, limit=self.products, seed=self.seed)

    def splits(self, catalogue: Catalogue) -> Mapping[str, Sequence[Task]]:
        goals = make_goals(catalogue, human=self.files["human"] is not None, seed=self.seed)
        parts = split_goals(goals, evaluation=self.evaluation)
        test = numbered(parts["evaluation"], 0, "test")
        drawn = sorted(random.Random(f"panel:{self.seed}").sample(range(self.evaluation), self.panel))
        return {
            "train": numbered(parts["train"], self.evaluation, "train"),
            "val": [test[number] for number in drawn],
            "test": test,
        }


class BuildShop(ShopTask):
    """A generated shop, its tokenizer, and plain text about another one: no download. Deterministic.

    As in WebShop, goals of one product (they differ in options) may lie in several splits; no goal lies in two.

    Args:
        seed: of everything.
        size: number of products.
        val: goals for validation.
        test: goals for the test.
        demonstrations: goals for an expert.
        asin_digits, max_values, brands, in_title, capitals: see ``generate_catalogue``.
        shown: products on a page of results in the texts: ``topk`` of ``Shopping``.
        bank: skills whose words the tokenizer and the texts shall hold: name or file.
        vocab_size: of the tokenizer.
        articles: sequences of plain text, to teach a model the language.
        article_tokens: length of each.
    """

    def __init__(
        self,
        seed: int = 0,
        size: int = 540,
        val: int = 64,
        test: int = 128,
        demonstrations: int = 1200,
        asin_digits: int = 4,
        max_values: int = 3,
        brands: int = 8,
        in_title: int = 2,
        capitals: bool = False,
        shown: int = 3,
        bank: str = "shopping_tiny",
        vocab_size: int = 1280,
        articles: int = 4000,
        article_tokens: int = 384,
    ) -> None:
        self.seed, self.size, self.shown = seed, size, shown
        self.sizes = {"val": val, "test": test, "demonstrations": demonstrations}
        for name, n in {**self.sizes, "shown": shown}.items():
            if n < 1:
                raise ValueError(f"{name} is {n}; expected at least one {'product' if name == 'shown' else 'goal'}")
        self.options = {
            "asin_digits": asin_digits, "max_values": max_values, "brands": brands, "in_title": in_title,
            "capitals": capitals,
        }  # fmt: skip
        self.bank: SkillBank = read_bank(bank)
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def run(self, output_dir: Path) -> dict[str, Any]:
        """As every shop, and ``tokenizer/`` and ``articles.parquet``."""
        figures = super().run(output_dir)
        vocabulary = write_language(
            output_dir, self._texts(), self.seed, self.vocab_size, self.articles, self.article_tokens, DIGITS
        )
        return {"vocabulary": vocabulary} | figures

    def _texts(self) -> Draw:
        """Draws texts about another shop: other products, other goals, other prices."""
        other = generate_catalogue(self.size, self.seed + 1, **self.options)
        goals = make_goals(other, seed=self.seed + 1)

        def visit(rng: random.Random) -> str:
            return visited(other, rng.choice(goals), rng, self.shown)

        return lambda rng: mixed_text(rng, self.bank, lambda drawn: label(other, drawn), visit)

    def catalogue(self) -> Catalogue:
        return generate_catalogue(self.size, self.seed, **self.options)

    def splits(self, catalogue: Catalogue) -> Mapping[str, Sequence[Task]]:
        goals = make_goals(catalogue, seed=self.seed)
        held_out = sum(self.sizes.values())
        parts = split_goals(goals, evaluation=held_out)
        splits, start = {}, 0
        for name, n in self.sizes.items():
            splits[name] = numbered(parts["evaluation"][start : start + n], start, name)
            start += n
        return splits | {"train": numbered(parts["train"], held_out, "train")}


def numbered(goals: Sequence[Goal], first: int, split: str) -> list[Task]:
    """Tasks, by their places in the shuffled list, of which ``goals`` are those from ``first`` on."""
    return [as_task(goal, number, split) for number, goal in enumerate(goals, start=first)]
