"""Stages that write a shop's catalogue, its goals as question files, and text to learn from."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt
from experiments.worlds.language import Draw, mixed_text, write_language
from experiments.worlds.shopping.catalogue import Catalogue, write_catalogue
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import Goal, as_task, make_goals, split_goals
from experiments.worlds.shopping.search_index import write_corpus
from experiments.worlds.shopping.texts import label, visited
from experiments.worlds.shopping.webshop_files import load_webshop
from experiments.worlds.world_task import write_splits
from rollout.skills.bank import SkillBank
from rollout.skills.reading import read_bank
from rollout.trajectory import Task

DIGITS = 2  # digits of a number in one token: a product's number is two tokens to copy


class ShopTask(ABC):
    """Base class of the stages that write a shop: products, a search corpus and question files."""

    @abstractmethod
    def catalogue(self) -> Catalogue: ...

    @abstractmethod
    def splits(self, catalogue: Catalogue) -> Mapping[str, Sequence[Task]]:
        """Make the shopping tasks of each split. A split's name is that of the question file to write."""

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the products, the search corpus and the question files of a shop to ``output_dir``. They are
        ``catalogue.jsonl`` (for the environment), ``corpus.jsonl`` (for the index) and one ``.parquet`` per split.

        Raises:
            CatalogueError: see ``load_webshop``.
            ValueError: too few goals for the splits.
        """
        catalogue = self.catalogue()
        splits = self.splits(catalogue)
        write_catalogue(catalogue, output_dir / "catalogue.jsonl")
        write_corpus(catalogue, output_dir / "corpus.jsonl")
        return {"products": len(catalogue)} | write_splits(output_dir, splits)


class ListWebShop(ShopTask):
    """Writes WebShop's published products, and its goals as question files, split as in verl-agent and SDAR.
    Deterministic.

    The first 500 goals of the shuffled list are the test, and training uses the others. The released evaluation draws
    128 of the 500 each time (docs/algorithms/sdar.md). Here the 128 of the validation are drawn once, and the test uses
    all 500. Validation goals are part of the test, so do not choose checkpoints by them.

    Args:
        items: WebShop's ``items_shuffle_1000.json`` (published: ``use_small``), or ``items_shuffle.json``.
        attributes: ``items_ins_v2_1000.json`` or ``items_ins_v2.json``, which have the synthetic instructions.
        products: number of items to read from the start of the file; None for all.
        seed: seed of price limits, of prices with a range, and of the panel.
        evaluation: number of goals of the test.
        panel: number of these for validation.
    """

    def __init__(
        self,
        items: str,
        attributes: str,
        products: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
        evaluation: PositiveInt = 500,
        panel: PositiveInt = 128,
    ) -> None:
        if not 1 <= panel <= evaluation:
            raise ValueError(
                f"panel is {panel}; expected 1 to {evaluation} (evaluation), because the panel is a part of it"
            )
        self.items, self.attributes = items, attributes
        self.products, self.seed = products, seed
        self.evaluation, self.panel = evaluation, panel

    def catalogue(self) -> Catalogue:
        return load_webshop(self.items, self.attributes, limit=self.products, seed=self.seed)

    def splits(self, catalogue: Catalogue) -> Mapping[str, Sequence[Task]]:
        goals = make_goals(catalogue, seed=self.seed)
        parts = split_goals(goals, evaluation=self.evaluation)
        test = numbered(parts["evaluation"], 0, "test")
        drawn = sorted(random.Random(f"panel:{self.seed}").sample(range(self.evaluation), self.panel))
        return {
            "train": numbered(parts["train"], self.evaluation, "train"),
            "val": [test[number] for number in drawn],
            "test": test,
        }


class BuildShop(ShopTask):
    """Writes a generated shop, its tokenizer, and plain text about another shop, without a download. Deterministic.

    As in WebShop, goals of one product (they differ in options) may be in several splits; no goal is in two.

    Args:
        seed: seed of all draws.
        size: number of products.
        val: goals for validation.
        test: goals for the test.
        demonstrations: goals for an expert.
        asin_digits, max_values, brands, capitals: see ``generate_catalogue``.
        shown: products per page of results in the texts: ``topk`` of ``Shopping``.
        bank: skill bank whose words the tokenizer and the texts must contain: name or file.
        vocab_size: vocabulary size of the tokenizer.
        articles: number of plain-text sequences that teach a model the language.
        article_tokens: tokens per sequence.
    """

    def __init__(
        self,
        seed: NonNegativeInt = 0,
        size: PositiveInt = 540,
        val: PositiveInt = 64,
        test: PositiveInt = 128,
        demonstrations: PositiveInt = 1200,
        asin_digits: PositiveInt = 4,
        max_values: PositiveInt = 3,
        brands: PositiveInt = 8,
        capitals: bool = False,
        shown: PositiveInt = 3,
        bank: str = "shopping_tiny",
        vocab_size: PositiveInt = 1280,
        articles: PositiveInt = 4000,
        article_tokens: PositiveInt = 384,
    ) -> None:
        self.seed, self.size, self.shown = seed, size, shown
        self.sizes = {"val": val, "test": test, "demonstrations": demonstrations}
        self.options = {
            "asin_digits": asin_digits, "max_values": max_values, "brands": brands, "capitals": capitals,
        }  # fmt: skip
        self.bank: SkillBank = read_bank(bank)
        self.vocab_size, self.articles, self.article_tokens = vocab_size, articles, article_tokens

    def run(self, output_dir: Path) -> dict[str, Any]:
        """Write the products, search corpus and question files of a generated shop, ``tokenizer/`` and
        ``articles.parquet`` to ``output_dir``. Returns counts.
        """
        counts = super().run(output_dir)
        vocabulary = write_language(
            output_dir, self._texts(), self.seed, self.vocab_size, self.articles, self.article_tokens, DIGITS
        )
        return {"vocabulary": vocabulary} | counts

    def _texts(self) -> Draw:
        """Return a function that draws random texts about another shop: other products, goals and prices."""
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
    """Return the goals as tasks. The first has the index ``first`` in the shuffled list of goals."""
    return [as_task(goal, number, split) for number, goal in enumerate(goals, start=first)]
