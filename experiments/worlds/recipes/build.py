"""Stage that writes orders, a skill bank of their recipes, and a tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeInt, PositiveInt, UnitInterval
from experiments.worlds.tokenizer_training import train_tokenizer
from experiments.worlds.world_task import WorldTask
from rollout.skills.bank import Skill
from rollout.skills.reading import read_bank
from rollout.trajectory import Task

SOURCE = "recipes"
ORDERS = range(1000, 10_000)  # numbers of orders, which distinguish orders of one product
DIGITS = 2  # digits of a number in one token
STEP = re.compile(r"step (\d+) (\w+)")


class BuildRecipes(WorldTask):
    """Writes orders for products, each with a recipe (devices in order), as question files, and a tokenizer.
    Deterministic.

    In train, val and test, the recipe of a product is the one in its skill; the order does not contain it. So the
    recipe is what a model can learn, and the three splits order the same products (no order is in two of them). In the
    demonstrations every order has its own recipe, and a share of the orders shows it (``DemonstratedRecipe``). So
    demonstrations teach how to read a recipe, but no recipe.

    Args:
        seed: seed of all draws.
        bank: skill bank with one skill per product (the product is the skill's category): name or file.
        train: orders for training.
        val: orders for validation.
        test: orders for the test.
        demonstrations: orders for an expert.
        shown: share of the demonstrations that show their recipe.
        vocab_size: vocabulary size of the tokenizer.
    """

    def __init__(
        self,
        seed: NonNegativeInt = 0,
        bank: str = "recipes_tiny",
        train: PositiveInt = 2000,
        val: PositiveInt = 128,
        test: PositiveInt = 16,
        demonstrations: PositiveInt = 3000,
        shown: UnitInterval = 0.5,
        vocab_size: PositiveInt = 512,
    ) -> None:
        super().__init__(seed, train, val, test, demonstrations, vocab_size)
        self.recipes = {name: read_recipe(skills[0]) for name, skills in read_bank(bank).by_category.items()}
        self.devices = sorted({device for recipe in self.recipes.values() for device in recipe})
        most = len(self.recipes) * len(ORDERS) // 2
        if (found := sum(self.sizes.values())) > most:
            raise ValueError(f"{found} orders of {len(self.recipes)} products; expected at most {most} in all")
        self.shown = shown

    def _splits(self) -> dict[str, list[Task]]:
        rng = random.Random(f"recipes:{self.seed}")
        taken: set[str] = set()
        return {name: self._orders(name, n, rng, taken) for name, n in self.sizes.items()}

    def _write_language(self, folder: Path, demonstrations: list[Task]) -> int:
        tokenizer = train_tokenizer(texts(demonstrations), self.vocab_size, DIGITS, spaced_numbers=True)
        tokenizer.save_pretrained(folder / "tokenizer")
        return len(tokenizer)

    def _orders(self, split: str, n: int, rng: random.Random, taken: set[str]) -> list[Task]:
        """Draw ``n`` new orders as tasks, the products in turn, and add their questions to ``taken``."""
        tasks: list[Task] = []
        while len(tasks) < n:
            product, recipe = list(self.recipes.items())[len(tasks) % len(self.recipes)]
            question = f"make {product}, order {rng.choice(ORDERS)}. step 1"
            if question in taken:
                continue
            taken.add(question)
            metadata: dict[str, Any] = {"split": split, "product": product, "recipe": recipe}
            if split == "demonstrations":
                drawn = rng.sample(self.devices, len(recipe))
                metadata |= {"recipe": drawn, "devices": self.devices, "shown": rng.random() < self.shown}
            tasks.append(Task(f"{split}-{len(tasks)}", question, (), SOURCE, metadata=metadata))
        return tasks


def read_recipe(skill: Skill) -> list[str]:
    """Return the devices that a skill (advice text) names, in order.

    >>> read_recipe(Skill("cider", "Making cider", "For cider: step 1 mill, step 2 press", "when cider is ordered"))
    ['mill', 'press']

    Raises:
        ValueError: the skill does not name a device for step 1, 2 and so on.
    """
    found = STEP.findall(skill.principle)
    if not found or [number for number, _ in found] != [str(i) for i in range(1, len(found) + 1)]:
        raise ValueError(f'skill {skill.id!r}: {skill.principle!r}; expected "step 1 DEVICE, step 2 DEVICE" and so on')
    return [device for _, device in found]


def with_recipe(product: str, recipe: Sequence[str]) -> Skill:
    """Return a skill (advice text) with this recipe, worded as in the skill bank."""
    steps = ", ".join(f"step {number} {device}" for number, device in enumerate(recipe, 1))
    return Skill(product, f"Making {product}", f"For {product}: {steps}.", f"when {product} is ordered")


def texts(orders: Sequence[Task]) -> list[str]:
    """Return the tokenizer's training texts: all that an agent reads and writes about recipes."""
    facts = [(task.metadata["product"], task.metadata["recipe"], task.question) for task in orders[:2000]]
    prompts = [f"<|im_start|>user\n{with_recipe(name, recipe).principle}\n{asked}" for name, recipe, asked in facts]
    actions = [f"<|im_start|>assistant\n<action> step 1 {d} </action>" for d in orders[0].metadata["devices"]] * 200
    return [*prompts, *actions, *["\nnothing happens. step 2\ndone"] * 200]
