"""WebShop's score of a purchase, between 0 and 1.

    score = r_type * (matched attributes + matched options + [price <= limit]) / (attributes + options + 1)

Source: web_agent_site/engine/goal.py (``get_reward``) and normalize.py. Two texts match if their ``token_set_ratio`` is
above 85.

**Difference.** The published ``r_type`` compares the nouns of two titles, tagged by spaCy. spaCy and its model are not
installed here, so ``title_words`` takes all words except numbers and a list of function words. So verbs and adjectives
count on both sides: two titles that share only an adjective are similar here and not there, and a title with many
adjectives shares a smaller part of its words. Thresholds limit the effect: ``r_type`` is 0 at a share of 0, 0.1 below
0.1, and otherwise 1 for the same query, the same category or a share above 0.2, else 0.5. Both forms agree on the
goal's own product and may differ slightly on another product near a threshold. A score of 1.0 needs ``r_type``
1.

**Options.** The published code compares the chosen *values*, after ``normalize_colour``, with the *(name, value) pairs*
of a synthetic goal. Normalisation changes a pair only if its value is nothing but a colour. So the right choice
"lightblue" is "blue" on one side and "color lightblue" on the other, and such a goal cannot be reached. A user of the
code counted 458 of the 6910 goals of the 1000-product set. ``pairs`` does the same, for comparison with published
results; ``values`` compares values with values, so every goal can be reached.
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
# In the published order: the first colour that is part of a text replaces the text.
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
    """Return the score of a purchase (product and chosen options), compared with a goal.

    Args:
        options: chosen value by option name.
        option_texts: see the module docstring.
    """
    kind = type_score(product, goal)
    attributes, chosen = attribute_matches(product, goal), option_matches(options, goal, option_texts)
    price = product.price <= goal.price_upper
    share = (attributes + chosen + price) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(kind * share, kind, attributes, chosen, price)


def title_words(title: str) -> list[str]:
    """Return the words of a product title without numbers and function words, in lower case and order, with
    repetitions. They stand for its nouns.

    >>> title_words("Sony 65-inch TV with the Sony Remote")
    ['sony', 'inch', 'tv', 'sony', 'remote']
    """
    return [word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS]


def type_score(product: Product, goal: Goal) -> float:
    """Return WebShop's ``r_type``, 0 to 1: how well the kind of the bought product matches the goal's."""
    wanted = title_words(goal.title)
    # Distinct common words over all wanted words, repetitions counted, as published.
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
    """Return how many of the goal's attributes match an attribute of the product, or occur in its title, features or
    description.
    """
    written = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(token_set_ratio(own, wanted) > MATCH_ABOVE for own in product.attributes)
        or any(wanted in text for text in written)
        for wanted in goal.attributes
    )


def option_matches(options: Mapping[str, str], goal: Goal, option_texts: OptionTexts = "pairs") -> int:
    """Return how many of the goal's option values match a chosen value, of an option with any name."""
    chosen = [normalize_colour(value) for value in options.values()]
    wanted = [_wanted_text(name, value, option_texts) for name, value in goal.options]
    return sum(any(token_set_ratio(own, text) > MATCH_ABOVE for own in chosen) for text in wanted)


def _wanted_text(name: str, value: str, option_texts: OptionTexts) -> str:
    if option_texts == "values":
        return normalize_colour(value)
    # As published: "is this colour an element of the pair", else the pair's own text.
    return next((colour for colour in COLOURS if colour in (name, value)), f"{name} {value}")


def normalize_colour(text: str) -> str:
    """Return the first of ``COLOURS`` that is part of the text, else the text itself. As published, "rectangular" is
    "tan".

    >>> normalize_colour("r.brown2060"), normalize_colour("x-large")
    ('brown', 'x-large')
    """
    return next((colour for colour in COLOURS if colour in text), text)
