"""What is to be bought: goals out of a catalogue's instructions, in the published order and splits.

Published: web_agent_site/engine/goal.py (``get_goals``) and the splits of WebShop's and verl-agent's training code. A
synthetic goal (``human_goals: False``) is a product's attribute instruction with one combination of its options and a
price limit; a human goal is a sentence of a person with a price limit. The list is shuffled with the seed 233, then
its first 500 are kept for evaluation.

Price limits are drawn as published, two of the next four multiples of ten above the product's price, the greater one,
but from a generator that depends on ``seed`` and the product alone: the published code draws them before it sets its
seed, so that its goals differ from process to process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.environments.shopping.catalogue import Catalogue
from rollout.environments.shopping.products import Product
from rollout.trajectory import Task

SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))
METADATA = "shopping"  # Task.metadata's key of the goal


@dataclass(frozen=True, slots=True)
class Goal:
    """What the score compares a purchase with. The product itself is one way to reach the goal."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]  # (name, value); a person's goal gives values only: ("", value)
    price_upper: float  # dollars; the price may be this at most
    title: str
    category: str
    query: str
    product_category: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for ``Task.metadata``; ``options`` is an object, or a list where they have no names."""
        named = all(name for name, _ in self.options)
        options: Any = dict(self.options) if named else [value for _, value in self.options]
        return {name: getattr(self, name) for name in self.__slots__} | {
            "attributes": list(self.attributes), "options": options,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Goal:
        """What ``to_json`` gave. Raises ValueError for anything else."""
        try:
            options = values["options"]
            pairs = options.items() if isinstance(options, Mapping) else [("", value) for value in options]
            changed = {"attributes": tuple(values["attributes"]), "options": tuple((n, v) for n, v in pairs)}
            goal = cls(**({name: values[name] for name in cls.__slots__} | changed))
            goal._check_types()
            return goal
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"no goal of the shop ({type(error).__name__}: {error}); expected an object with "
                f"{', '.join(cls.__slots__)}; write the tasks with goals.as_task"
            ) from error

    def _check_types(self) -> None:
        """Raises TypeError: what is no text would fail in the middle of an episode, where the score reads it."""
        texts = [getattr(self, name) for name in self.__slots__ if name not in ("attributes", "options", "price_upper")]
        if not all(isinstance(text, str) for text in (*texts, *self.attributes, *itertools.chain(*self.options))):
            raise TypeError("something is no text")
        if isinstance(self.price_upper, bool) or not isinstance(self.price_upper, (int, float)):
            raise TypeError(f"price_upper is {self.price_upper!r:.40}, no number")


def make_goals(catalogue: Catalogue, human: bool = False, seed: int = 0) -> list[Goal]:
    """All goals of a catalogue, shuffled as published.

    Args:
        human: the instructions people wrote, else the synthetic ones.
        seed: of the price limits.

    Raises:
        ValueError: the catalogue holds no such instruction.
    """
    make = _human_goals if human else _synthetic_goals
    goals = [goal for product in catalogue.products for goal in make(product, seed)]
    if not goals:
        kind, file = ("human", "items_human_ins.json") if human else ("synthetic", "items_ins_v2*.json")
        raise ValueError(f"{len(catalogue)} products without one {kind} instruction; read the catalogue with {file}")
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def split_goals(goals: Sequence[Goal], evaluation: int = 500, development: int = 0) -> dict[str, list[Goal]]:
    """The first ``evaluation`` goals of a shuffled list, the next ``development``, and the rest for training.

    Published: 500 and 0 by verl-agent (and SDAR, which is built on it), 500 and 1000 by WebShop's own baselines. Goals
    of one product may lie in several parts, as published.

    Returns:
        "evaluation", "development" (unless it is 0) and "train".

    Raises:
        ValueError: a number is negative, or no goal is left for training.
    """
    if evaluation < 0 or development < 0:
        raise ValueError(f"expected evaluation and development of 0 or more; found {evaluation} and {development}")
    held_out = evaluation + development
    if len(goals) <= held_out:
        raise ValueError(
            f"{len(goals)} goals, {held_out} of them held out, leave none for training; take more products"
        )
    parts = {"evaluation": list(goals[:evaluation]), "train": list(goals[held_out:])}
    return parts | ({"development": list(goals[evaluation:held_out])} if development else {})


def as_task(goal: Goal, number: int, split: str) -> Task:
    """The goal as a task: ``question`` is the instruction, ``data_source`` the category. ``metadata["index"]`` is
    ``number``, the goal's place in the shuffled list, by which a WebShop server knows it."""
    return Task(
        id=f"shopping-{split}-{number}",
        question=goal.instruction,
        golden_answers=(),
        data_source=goal.category,
        metadata={METADATA: goal.to_json(), "split": split, "index": number},
    )


def goal_of(task: Task) -> Goal:
    """Raises ValueError for a task without a goal of the shop."""
    if METADATA not in task.metadata:
        raise ValueError(f"task {task.id}: its metadata has no {METADATA!r}; expected a task of goals.as_task")
    return Goal.from_json(task.metadata[METADATA])


def _synthetic_goals(product: Product, seed: int) -> Iterator[Goal]:
    """One for each combination of options, options in the order of their names; one price limit for all."""
    wish = product.synthetic
    if wish is None:
        return
    if not wish.attributes:
        raise ValueError(f"product {product.asin}: its instruction has no attribute; expected at least one to score")
    limit, limit_text = _price_limit(product.price, random.Random(f"{seed}:{product.asin}"))
    ordered = sorted(product.options, key=lambda option: option.name)
    for values in itertools.product(*(option.values for option in ordered)):
        options = tuple(zip((option.name for option in ordered), values, strict=True))
        chosen = ", and ".join(f"{name}: {value}" for name, value in options)
        text = f"{wish.text} with {chosen}{limit_text}" if chosen else wish.text + limit_text
        yield _goal(product, text, wish.attributes, options, limit)


def _human_goals(product: Product, seed: int) -> Iterator[Goal]:
    """Instructions without an attribute are left out, as published."""
    rng = random.Random(f"{seed}:{product.asin}")
    for wish in product.human:
        if wish.attributes:
            limit, limit_text = _price_limit(product.price, rng)
            options = tuple(("", value) for value in wish.options)
            yield _goal(product, wish.text.strip(".") + limit_text, wish.attributes, options, limit)


def _goal(
    product: Product, text: str, attributes: tuple[str, ...], options: tuple[tuple[str, str], ...], limit: float
) -> Goal:
    return Goal(
        asin=product.asin, instruction=text, attributes=attributes, options=options, price_upper=limit,
        title=product.title, category=product.category, query=product.query, product_category=product.product_category,
    )  # fmt: skip


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """The limit in dollars, and how the instruction says it. A price above 970 dollars gets none."""
    above = [limit for limit in PRICE_LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
