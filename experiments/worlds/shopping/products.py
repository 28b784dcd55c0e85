"""Products, options and instructions of a catalogue."""

from __future__ import annotations

from dataclasses import dataclass


class CatalogueError(ValueError):
    """A catalogue file that cannot be used. The message names the file and the item."""


@dataclass(frozen=True, slots=True)
class Option:
    """Something to choose before buying: {"size": ["small", "large"]}. Name and values are in lower case."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction to buy something, in words, and the parts of it that are scored."""

    text: str
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    category: str  # "fashion"
    query: str  # the search that the product was found by, in lower case: WebShop's finest kind of category
    product_category: str  # a path, parts divided by "›"
    description: str
    bullets: tuple[str, ...]  # "Features"
    options: tuple[Option, ...]
    attributes: tuple[str, ...]
    prices: tuple[float, ...]  # dollars; two for a range
    price: float  # what it costs when it is bought: of a range, a draw
    synthetic: Instruction | None = None

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)
