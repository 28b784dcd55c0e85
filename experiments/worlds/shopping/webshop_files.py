"""Reader of WebShop's published data files, which returns ``Product``s.

The files are two JSON files (princeton-nlp/WebShop, web_agent_site/engine/engine.py, ``load_products``): the items
(``items_shuffle*.json``, a list) and their attributes with one synthetic instruction each (``items_ins_v2*.json``, by
asin). Human instructions are not read; SDAR does not use them. Items are read as published: an asin that is "nan" or
longer than ten characters is left out, the first of two items with one asin stays, option names and values are in lower
case with " | " for "/", and a missing price is 100 dollars. Images and reviews are not read.

One difference: for a price range, the published code draws the price in every process without a seed. Here the draw
depends only on ``seed`` and the asin.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.products import CatalogueError, Instruction, Option, Product

DEFAULT_PRICE = 100.0
NO_ATTRIBUTE = "DUMMY_ATTR"  # the published placeholder of an item that is missing in the attribute file
MAX_ASIN = 10
_REQUIRED = ("asin", "name", "category", "query", "product_category", "full_description", "small_description")


def load_webshop(items: str | Path, attributes: str | Path, limit: int | None = None, seed: int = 0) -> Catalogue:
    """Read WebShop's published data files into a catalogue of the usable products, in file order.

    Args:
        items: ``items_shuffle*.json``.
        attributes: ``items_ins_v2*.json``.
        limit: number of items to read from the start of the file (published: 1000 with ``use_small``).
        seed: seed of the prices of products with a price range.

    Raises:
        CatalogueError: a file is missing, is not JSON, has another shape, or has no usable product.
    """
    by_asin = _read_json(Path(attributes), dict, "an object by asin")
    products = list(_read_items(Path(items), limit, by_asin, seed))
    if not products:
        raise CatalogueError(f"{items}: no usable product; expected at least one with an asin of 1 to 10 characters")
    return Catalogue(products)


def _read_json(path: Path, kind: type, expected: str) -> Any:
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CatalogueError(f"{path}: {error.strerror}; expected {expected}") from error
    except orjson.JSONDecodeError as error:
        raise CatalogueError(f"{path}: not JSON ({error}); expected {expected}") from error
    if not isinstance(content, kind):
        raise CatalogueError(f"{path}: found {type(content).__name__}; expected {expected}")
    return content


def _read_items(path: Path, limit: int | None, attributes: dict[str, Any], seed: int) -> Iterator[Product]:
    seen: set[str] = set()
    for number, item in enumerate(_read_json(path, list, "a list of items")[:limit]):
        where = f"{path}, item {number}"
        if not isinstance(item, dict):
            raise CatalogueError(f"{where}: found {type(item).__name__}; expected an object")
        missing = [key for key in _REQUIRED if key not in item]
        if missing:
            raise CatalogueError(f"{where}: no {', '.join(missing)}; it has {', '.join(sorted(item))}")
        asin = item["asin"]
        if not isinstance(asin, str) or asin == "nan" or not 1 <= len(asin) <= MAX_ASIN or asin in seen:
            continue
        seen.add(asin)
        try:
            yield _product(item, attributes.get(asin), seed)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CatalogueError(
                f"{where} ({asin}): not of WebShop's shape ({type(error).__name__}: {error}); "
                "mend or remove it in the items file, or its entry in the attribute file"
            ) from error


def _product(item: dict[str, Any], known: dict[str, Any] | None, seed: int) -> Product:
    asin, known = item["asin"], known or {}
    prices = read_prices(item.get("pricing"))
    small = item["small_description"]
    wish = known.get("instruction")
    return Product(
        asin=asin,
        title=_text(item["name"]),
        category=_text(item["category"]),
        query=_text(item["query"]).lower().strip(),
        product_category=_text(item["product_category"]),
        description=_text(item["full_description"]),
        bullets=_texts(small if isinstance(small, list) else [small]),
        options=_options(item.get("customization_options")),
        attributes=_texts(known["attributes"]) if "attributes" in known else (NO_ATTRIBUTE,),
        prices=prices,
        price=prices[0] if len(prices) == 1 else random.Random(f"{seed}:{asin}").uniform(*prices),
        synthetic=None if wish is None else Instruction(_text(wish), _texts(known["instruction_attributes"])),
    )


def _text(value: Any) -> str:
    """Return a text unchanged, and null, which the released items contain, as "". Raises TypeError for other values."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a text; found {str(value)[:40]!r}")
    return value or ""


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"expected a list of texts; found {str(values)[:40]!r}")
    return tuple(_text(value) for value in values if value is not None)


def read_prices(pricing: str | None) -> tuple[float, ...]:
    """Return one price, or the two ends of a price range, in dollars, from WebShop's text.

    >>> read_prices("$1,299.50"), read_prices("$9.98 - $16.98"), read_prices(None)
    ((1299.5,), (9.98, 16.98), (100.0,))
    """
    found = [re.sub(r"[^\d.]", "", part) for part in (pricing or "").split("$")[1:]]
    return tuple(float(price) for price in found[:2]) or (DEFAULT_PRICE,)


def _options(options: dict[str, Any] | None) -> tuple[Option, ...]:
    read: dict[str, tuple[str, ...]] = {}
    for name, contents in (options or {}).items():
        if contents is not None:
            values = (content["value"].strip().replace("/", " | ").lower() for content in contents)
            read[name.lower()] = tuple(values)
    return tuple(Option(name, values) for name, values in read.items())
