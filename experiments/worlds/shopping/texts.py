"""Plain text about visits to a shop, to teach a tiny model the language."""

from __future__ import annotations

import random

from experiments.worlds.shopping import pages
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.expert import query_words
from experiments.worlds.shopping.goals import Goal
from experiments.worlds.shopping.products import Product

HEAD = 2  # parts of a page: "Instruction:" and the instruction, which later pages of a conversation do not repeat
RANDOM_CLICKS = 0.5  # probability that an option or a product is chosen at random


def visited(catalogue: Catalogue, goal: Goal, rng: random.Random, shown: int) -> str:
    """Return the text of a visit to the shop. Half of its clicks are random.

    It shows pages and the effects of actions, but not how to buy the wanted product. The results are the goal's product
    and others of its kind, without a search.

    Args:
        shown: products on the page of results.
    """
    wanted = catalogue.by_asin[goal.asin]
    similar = [product for product in catalogue.products if product.query == wanted.query and product is not wanted]
    results = [wanted, *rng.sample(similar, min(shown - 1, len(similar)))]
    rng.shuffle(results)
    opened = rng.choice(results) if rng.random() < RANDOM_CLICKS else wanted
    item = _later(pages.item_page(goal.instruction, opened))
    lines = [
        pages.search_page(goal.instruction).text,
        _said(f"search[{query_words(goal)}]"),
        _later(pages.results_page(goal.instruction, results, 1, len(results))),
        _said(f"click[{opened.asin.lower()}]"),
        item,
    ]
    for value in _values(opened, goal, rng):
        lines += [_said(f"click[{value}]"), item]
    lines.append(_said(f"click[{rng.choice((pages.BUY, pages.FEATURES, pages.PREVIOUS)).lower()}]"))
    return "\n".join(lines) + "\n"


def label(catalogue: Catalogue, rng: random.Random) -> str:
    """Return a random text that a shop's page shows: a product's number, search query or attribute, or a value of
    one of its options."""
    product = rng.choice(catalogue.products)
    values = [value for option in product.options for value in option.values]
    return rng.choice((product.asin, product.asin.lower(), product.query, rng.choice(product.attributes), *values))


def _values(product: Product, goal: Goal, rng: random.Random) -> list[str]:
    """Return one value of each option of the product, chosen at random or as the goal wants."""
    wanted = dict(goal.options)
    drawn = [(option.name, rng.choice(option.values), rng.random() < RANDOM_CLICKS) for option in product.options]
    return [value if random_one or product.asin != goal.asin else wanted[name] for name, value, random_one in drawn]


def _said(action: str) -> str:
    return f"<action>{action}</action>"


def _later(page: pages.Page) -> str:
    return pages.SEPARATOR.join(page.texts[HEAD:])
