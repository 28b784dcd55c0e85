"""WebShop's score of a purchase, between 0 and 1.

    score = r_type * (matched attributes + matched options + [price <= limit]) / (attributes + options + 1)

Published: web_agent_site/engine/goal.py (``get_reward``) and normalize.py. Two texts match when their
``token_set_ratio`` is above 85.

**Where it differs.** The published ``r_type`` compares the nouns of two titles, which spaCy's tagger finds; spaCy and
its model are not installed here, so ``title_words`` takes all words but numbers and a list of function words. Verbs
and adjectives count, then, on both sides: two titles that share only an adjective are alike here and not there, and a
title with many adjectives shares a smaller part of its words with a product of the same kind. The share counts through
three thresholds: ``r_type`` is 0 at a share of 0, 0.1 below 0.1, and above that 1 for the same query, the same category
or a share above 0.2, else 0.5. So the two forms agree on the goal's own product, and may differ by a step or two on
another one whose share lies near a threshold. A score of 1.0 needs ``r_type`` 1.

**Options.** The published code compares the *values* that were chosen, after ``normalize_colour``, with the *(name,
value) pairs* of a synthetic goal, which the normalisation leaves alone unless the value is nothing but a colour. So
"lightblue", chosen as asked for, is "blue" on one side and "color lightblue" on the other, and does not match: such
goals cannot be reached. A user of the code counted 458 of the 6910 goals of the 1000-product set. ``pairs`` does the
same, for results to be compared with published ones; ``values`` compares values with values, so that every goal can be
reached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.worlds.shopping.fuzzy import token_set_ratio
from experiments.worlds.shopping.goals import Goal
from experiments.worlds.shopping.products import Product

OptionTexts = Literal["pairs", "values"]
MATCH_ABOVE = 85
_WORDS = json.loads(Path(__file__).with_name("reward_words.json").read_text(encoding="utf-8"))
# In the published order: the first that is a part of a text replaces the text.
COLOURS: list[str] = _WORDS["colours"]
_FUNCTION_WORDS = frozenset(_WORDS["function_words"])
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Score:
    total: float
    type: float  # 1.0, 0.5, 0.1 or 0.0
    attributes: int  # matched
    options: int  # matched
    price: bool


def score_purchase(
    product: Product, options: Mapping[str, str], goal: Goal, option_texts: OptionTexts = "pairs"
) -> Score:
    """Compare a purchase with a goal.

    Args:
        options: what was chosen, value by option name.
        option_texts: see the module docstring.
    """
    kind = type_score(product, goal)
    attributes, chosen = attribute_matches(product, goal), option_matches(options, goal, option_texts)
    price = product.price <= goal.price_upper
    share = (attributes + chosen + price) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(kind * share, kind, attributes, chosen, price)


def title_words(title: str) -> list[str]:
    """The words of a title that stand for its nouns, in lower case and order, repetitions kept.

    >>> title_words("Sony 65-inch TV with the Sony Remote")
    ['sony', 'inch', 'tv', 'sony', 'remote']
    """
    return [word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS]


def type_score(product: Product, goal: Goal) -> float:
    """Whether the purchase is a thing of the kind that was wanted."""
    wanted = title_words(goal.title)
    # Different common words over all wanted ones, repetitions counted: as published.
    common = len(set(wanted) & set(title_words(product.title))) / len(wanted) if wanted else 0.2
    if common == 0.0:
        return 0.0
    if common < 0.1:
        return 0.1
    same_query = product.query == goal.query
    same_category = len(_category_parts(product.product_category) & _category_parts(goal.product_category)) >= 2
    return 1.0 if same_query or same_category or common > 0.2 else 0.5


def _category_parts(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def attribute_matches(product: Product, goal: Goal) -> int:
    """Wanted attributes that are like one of the product's, or stand in its title, features or description."""
    written = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(token_set_ratio(own, wanted) > MATCH_ABOVE for own in product.attributes)
        or any(wanted in text for text in written)
        for wanted in goal.attributes
    )


def option_matches(options: Mapping[str, str], goal: Goal, option_texts: OptionTexts = "pairs") -> int:
    """Wanted options that are like one that was chosen, whatever its name."""
    chosen = [normalize_colour(value) for value in options.values()]
    wanted = [_wanted_text(name, value, option_texts) for name, value in goal.options]
    return sum(any(token_set_ratio(own, text) > MATCH_ABOVE for own in chosen) for text in wanted)


def _wanted_text(name: str, value: str, option_texts: OptionTexts) -> str:
    if option_texts == "values":
        return normalize_colour(value)
    # Published: "is this colour an element of the pair", and the pair's own text if none is.
    return next((colour for colour in COLOURS if colour in (name, value)), f"{name} {value}")


def normalize_colour(text: str) -> str:
    """The first of ``COLOURS`` that is a part of the text, else the text: "rectangular" is "tan", as published.

    >>> normalize_colour("r.brown2060"), normalize_colour("x-large")
    ('brown', 'x-large')
    """
    return next((colour for colour in COLOURS if colour in text), text)
