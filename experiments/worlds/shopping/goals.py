"""Shopping goals from a catalogue's instructions, in the published order and splits.

Source: web_agent_site/engine/goal.py (``get_goals``) and the splits of verl-agent's training code. A synthetic goal
(``human_goals: False``, as verl-agent and SDAR train) is a product's attribute instruction with one combination of its
options and a price limit. The list is shuffled with seed 233; the first 500 goals are for evaluation.

A price limit is the greater of two of the next four multiples of ten above the product's price, as published. Here the
draw depends only on ``seed`` and the product. The published code draws before it sets its seed, so its goals differ
from process to process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from common.validation import validated
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.products import Product
from rollout.trajectory import Task

SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
PRICE_LIMITS = tuple(10.0 * step for step in range(1, 100))
METADATA = "shopping"  # Task.metadata's key of the goal


def _as_pairs(options: Any) -> Any:
    return tuple(options.items()) if isinstance(options, dict) else options


@dataclass(frozen=True, slots=True)
class Goal:
    """The requirements with which a purchase is compared for its score. The goal's own product is one way to meet
    them."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_as_pairs)]  # (name, value); in JSON an object
    price_upper: float  # highest price in dollars
    title: str
    category: str
    query: str
    product_category: str

    def to_json(self) -> dict[str, Any]:
        """Return the goal as plain JSON data for ``Task.metadata``."""
        plain = {"attributes": list(self.attributes), "options": dict(self.options)}
        return {name: getattr(self, name) for name in self.__slots__} | plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Goal:
        """Return a goal read from ``to_json``'s output. Raises ValueError for anything else."""
        try:
            return validated(_GOAL, values, "goal")
        except ValueError as error:
            raise ValueError(f"no goal of the shop ({error}); write the tasks with goals.as_task") from None


_GOAL = TypeAdapter(Goal)


def make_goals(catalogue: Catalogue, seed: int = 0) -> list[Goal]:
    """Return all synthetic shopping goals of a product catalogue, shuffled as published.

    Args:
        seed: seed of the price limits.

    Raises:
        ValueError: the catalogue has no instruction.
    """
    goals = [goal for product in catalogue.products for goal in _synthetic_goals(product, seed)]
    if not goals:
        raise ValueError(
            f"{len(catalogue)} products without one synthetic instruction; read the catalogue with items_ins_v2*.json"
        )
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def split_goals(goals: Sequence[Goal], evaluation: int = 500) -> dict[str, list[Goal]]:
    """Split a shuffled list of goals: the first ``evaluation`` goals are "evaluation", the others "train".

    verl-agent and SDAR take 500. Goals of one product may be in both parts, as published.

    Raises:
        ValueError: the number is negative, or no goal is left for training.
    """
    if evaluation < 0:
        raise ValueError(f"evaluation is {evaluation}; expected 0 or more")
    if len(goals) <= evaluation:
        raise ValueError(
            f"{len(goals)} goals, {evaluation} of them held out, leave none for training; take more products"
        )
    return {"evaluation": list(goals[:evaluation]), "train": list(goals[evaluation:])}


def as_task(goal: Goal, number: int, split: str) -> Task:
    """Return a shopping goal as a task: ``question`` is the instruction, ``data_source`` the category.

    ``metadata["index"]`` is ``number``, the index in the shuffled list, by which a WebShop server knows the goal.
    """
    return Task(
        id=f"shopping-{split}-{number}",
        question=goal.instruction,
        golden_answers=(),
        data_source=goal.category,
        metadata={METADATA: goal.to_json(), "split": split, "index": number},
    )


def goal_of(task: Task) -> Goal:
    """Return the shopping goal of a task. Raises ValueError for a task without one."""
    if METADATA not in task.metadata:
        raise ValueError(f"task {task.id}: its metadata has no {METADATA!r}; expected a task of goals.as_task")
    return Goal.from_json(task.metadata[METADATA])


def _synthetic_goals(product: Product, seed: int) -> Iterator[Goal]:
    """Yield one goal of a product per combination of its options. Options are sorted by name, and all goals have the
    same price limit.
    """
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


def _goal(
    product: Product, text: str, attributes: tuple[str, ...], options: tuple[tuple[str, str], ...], limit: float
) -> Goal:
    return Goal(
        asin=product.asin, instruction=text, attributes=attributes, options=options, price_upper=limit,
        title=product.title, category=product.category, query=product.query, product_category=product.product_category,
    )  # fmt: skip


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """Return a random price limit above ``price``, in dollars, and its wording. A price above 970 dollars has no
    limit."""
    above = [limit for limit in PRICE_LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
