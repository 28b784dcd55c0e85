"""Tables of the generated shop: kinds of products, their attributes, options and prices. The words are in
``assortment.json``.

All words are our own choice. Within a category no attribute, and within an option no value, is so like another that
the score would take one for the other (``token_set_ratio`` above 85), and every colour is one that
``reward.normalize_colour`` keeps; a test holds the table to both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.worlds.shopping.products import Option


@dataclass(frozen=True, slots=True)
class Kind:
    name: str  # what it is searched by: "running shoes"
    phrase: str  # how an instruction asks for it: "a pair of running shoes"
    path: str  # product_category
    prices: tuple[int, int]  # dollars, whole: from the first to the second
    options: tuple[Option, ...]


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _kind(row: dict[str, Any]) -> Kind:
    options = (_TABLES["options"][name] for name in row["options"])
    chosen = tuple(Option(option["name"], tuple(option["values"])) for option in options)
    return Kind(row["name"], row["phrase"], row["path"], row["prices"], chosen)


KINDS: dict[str, tuple[Kind, ...]] = {category: tuple(map(_kind, rows)) for category, rows in _TABLES["kinds"].items()}
ATTRIBUTES: dict[str, list[str]] = _TABLES["attributes"]  # of products, by category
SYLLABLES: list[str] = _TABLES["syllables"]  # of brands
WISHES: list[str] = _TABLES["wishes"]  # wordings of an instruction
