"""Products, options and instructions of a catalogue."""

from __future__ import annotations

from dataclasses import dataclass


class CatalogueError(ValueError):
    """A product catalogue file is invalid. The message names the file and the item."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice before buying a product, such as the option "size" with the values "small" and "large". Both are in
    lower case.
    """

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction to buy something, in words, and the attributes that the score counts."""

    text: str
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    category: str  # "fashion"
    query: str  # the search that found the product, in lower case: WebShop's finest category
    product_category: str  # a path; its parts are divided by "›"
    description: str
    bullets: tuple[str, ...]  # "Features"
    options: tuple[Option, ...]
    attributes: tuple[str, ...]
    prices: tuple[float, ...]  # dollars; two for a range
    price: float  # its price when bought: a draw from a range
    synthetic: Instruction | None = None

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)
