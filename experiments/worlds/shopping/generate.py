"""A seeded generator of product catalogues, without a download.

A small catalogue (some dozens of products) has a closed vocabulary that a tiny model can learn. A large one (thousands)
has several products of every description, which differ in options and price.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from experiments.worlds.shopping.assortment import ATTRIBUTES, KINDS, SYLLABLES, WISHES, Kind
from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.products import Instruction, Option, Product
from experiments.worlds.shopping.webshop_files import MAX_ASIN

ASKED = 2  # attributes that a product's instruction asks for
FURTHER = 2  # attributes that it does not ask for


def generate_catalogue(
    size: int,
    seed: int = 0,
    asin_digits: int = 9,
    max_values: int = 3,
    brands: int = 24,
    capitals: bool = True,
) -> Catalogue:
    """Generate a catalogue of ``size`` random products, each with an instruction to buy it. All kinds are equally
    frequent.

    A product has four attributes of its category. Its instruction asks for two of them, and its title names these two,
    so the first result of a good search is nearly always right. Products of one kind differ in these two while pairs
    are left (45 of each kind).

    Args:
        size: number of products.
        seed: seed of all draws.
        asin_digits: digits of the asin after its "B"; few are easier to copy.
        max_values: values per option, two at least. A product with two options has 4 to ``max_values`` squared goals.
        brands: number of invented brands.
        capitals: write the words of a title with a capital. Without capitals each word has a single form.

    Raises:
        ValueError: an argument out of range, or fewer asins than products.
    """
    if size < 1 or max_values < 2 or brands < 1:
        raise ValueError(f"expected size >= 1, max_values >= 2, brands >= 1; found {size}, {max_values}, {brands}")
    if not 1 <= asin_digits < MAX_ASIN or 10**asin_digits < size:
        raise ValueError(f"asin_digits is {asin_digits}; expected 1 to {MAX_ASIN - 1}, and enough for {size} products")
    rng = random.Random(f"shop:{seed}")
    asins = [f"B{number:0{asin_digits}d}" for number in rng.sample(range(10**asin_digits), size)]
    names = _brands(brands, rng)
    shelves = [(category, kind) for category, kinds in KINDS.items() for kind in kinds]
    pairs = {kind.name: _pairs(category, rng) for category, kind in shelves}
    products = []
    for asin, (category, kind) in zip(asins, itertools.cycle(shelves), strict=False):
        asked = next(pairs[kind.name])
        attributes = (*asked, *rng.sample([a for a in ATTRIBUTES[category] if a not in asked], FURTHER))
        products.append(_product(asin, category, kind, attributes, rng.choice(names), max_values, rng))
    if not capitals:
        products = [dataclasses.replace(product, title=product.title.lower()) for product in products]
    rng.shuffle(products)
    return Catalogue(products)


def _brands(count: int, rng: random.Random) -> list[str]:
    every = ["".join(parts).title() for parts in itertools.permutations(SYLLABLES, 2)]
    if count > len(every):
        raise ValueError(f"brands is {count}; expected at most {len(every)}")
    return rng.sample(every, count)


def _pairs(category: str, rng: random.Random) -> itertools.cycle:
    """Return an endless iterator over pairs of requested attributes, in a random order that repeats."""
    choices = list(itertools.combinations(ATTRIBUTES[category], ASKED))
    rng.shuffle(choices)
    return itertools.cycle(choices)


def _product(
    asin: str, category: str, kind: Kind, attributes: tuple[str, ...], brand: str, max_values: int, rng: random.Random,
) -> Product:  # fmt: skip
    asked, further = attributes[:ASKED], attributes[ASKED:]
    price = round(rng.randint(*kind.prices) - 0.01, 2)
    options = tuple(_some_values(option, max_values, rng) for option in kind.options)
    wish = rng.choice(WISHES).format(f"{kind.phrase} with {' and '.join(asked)}")
    return Product(
        asin=asin,
        title=f"{brand} {kind.name.title()} with {' and '.join(a.title() for a in asked)}",
        category=category,
        query=kind.name,
        product_category=kind.path,
        description=f"The {kind.name} of {brand}: {asked[0]}, {further[0]}.",
        bullets=(f"{further[1]}, made by {brand}", asked[1]),
        options=options,
        attributes=attributes,
        prices=(price,),
        price=price,
        synthetic=Instruction(wish, asked),
    )


def _some_values(option: Option, most: int, rng: random.Random) -> Option:
    """Return a copy of an option (such as size) with two to ``most`` of its values, in their order."""
    values = rng.sample(option.values, rng.randint(2, min(most, len(option.values))))
    return Option(option.name, tuple(sorted(values, key=option.values.index)))
