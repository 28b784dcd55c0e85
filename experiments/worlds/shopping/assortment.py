"""Tables of the generated shop: kinds of products, attributes, options and prices. Words: ``assortment.json``.

All words are our own choice. The score must not confuse two attributes of a category or two values of an option
(``token_set_ratio`` above 85), and ``reward.normalize_colour`` must keep every colour. A test checks both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.worlds.shopping.products import Option


@dataclass(frozen=True, slots=True)
class Kind:
    name: str  # search words: "running shoes"
    phrase: str  # wording in an instruction: "a pair of running shoes"
    path: str  # product_category
    prices: tuple[int, int]  # whole dollars, from the first to the second
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
