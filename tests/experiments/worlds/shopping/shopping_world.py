"""A small shop with everything in it that the rules distinguish, and a retriever that needs no Lucene."""

from __future__ import annotations

import json
import re
from pathlib import Path

from experiments.worlds.shopping.catalogue import Catalogue, write_catalogue
from experiments.worlds.shopping.goals import Goal
from experiments.worlds.shopping.search_index import passage
from experiments.worlds.shopping.webshop_files import load_webshop
from retrieval.types import Document, RetrievalError

ITEMS = [
    {
        "asin": "B000000001", "name": "Norvik Men's Shirt, Slim Fit", "category": "fashion", "query": " Men's Shirts ",
        "product_category": "Clothing › Men › Shirts", "full_description": "A light shirt.",
        "small_description": ["100% Cotton", "Machine Wash"], "pricing": "$19.99", "images": ["x.jpg"],
        "customization_options": {
            "Color": [{"value": "Light/Blue", "image": None}, {"value": " red ", "image": "r.jpg"}],
            "Size": [{"value": "Small"}, {"value": "X-Large"}],
            "Style": None,
        },
    },
    {
        "asin": "B000000002", "name": "Tamrose Shampoo", "category": "beauty", "query": "shampoo",
        "product_category": "Beauty › Hair › Shampoo", "full_description": None, "small_description": "With tea tree",
        "pricing": "$9.98 - $16.98", "images": [], "customization_options": "",
    },
    {
        "asin": "B000000001", "name": "Second of this asin", "category": "fashion", "query": "q",
        "product_category": "a", "full_description": "", "small_description": [], "pricing": "$1", "images": [],
        "customization_options": None,
    },
    {
        "asin": "nan", "name": "no asin", "category": "", "query": "", "product_category": "", "full_description": "",
        "small_description": [], "pricing": None, "images": [], "customization_options": None,
    },
    {
        "asin": "B0000000011", "name": "asin too long", "category": "", "query": "", "product_category": "",
        "full_description": "", "small_description": [], "pricing": None, "images": [], "customization_options": None,
    },
    {
        "asin": "B000000003", "name": "Lamp", "category": "garden", "query": "lamps",
        "product_category": "Home › Lamps", "full_description": "", "small_description": [], "pricing": "",
        "images": [], "customization_options": {},
    },
]  # fmt: skip
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["slim fit", "machine wash"], "instruction": "Find me slim fit men's shirts",
        "instruction_attributes": ["slim fit"],
    },
    "B000000002": {
        "attributes": ["tea tree"], "instruction": "Find me tea tree shampoo", "instruction_attributes": ["tea tree"],
    },
}  # fmt: skip


def write_files(folder: Path) -> dict[str, Path]:
    """The two files as WebShop writes them: arguments of ``load_webshop``."""
    files = {"items": ("items_shuffle.json", ITEMS), "attributes": ("items_ins_v2.json", ATTRIBUTES)}
    for name, content in files.values():
        (folder / name).write_text(json.dumps(content))
    return {key: folder / name for key, (name, _) in files.items()}


def published_catalogue(folder: Path) -> Catalogue:
    return load_webshop(**write_files(folder))


def catalogue_file(folder: Path) -> str:
    """The published catalogue as the environment reads it."""
    write_catalogue(published_catalogue(folder), folder / "catalogue.jsonl")
    return str(folder / "catalogue.jsonl")


def goal(**changes) -> Goal:
    values = {
        "asin": "B000000001", "instruction": "find me a shirt", "attributes": ("slim fit",),
        "options": (("color", "red"), ("size", "small")), "price_upper": 30.0, "title": "Norvik Men's Shirt, Slim Fit",
        "category": "fashion", "query": "men's shirts", "product_category": "Clothing › Men › Shirts",
    }  # fmt: skip
    return Goal(**(values | changes))


class WordRetriever:
    """Finds documents by the number of words in common, ties in corpus order; fails when told to."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._texts = [(p.asin, passage(p)["contents"]) for p in catalogue.products]
        self.asked: list[str] = []
        self.fails = False
        self.closed = 0

    async def search(self, queries: list[str], k: int) -> list[list[Document]]:
        if self.fails:
            raise RetrievalError("the retriever has ended with code 1")
        self.asked += queries
        return [self._best(set(re.findall(r"\w+", query.lower())), k) for query in queries]

    def _best(self, words: set[str], k: int) -> list[Document]:
        scored = [(len(words & set(re.findall(r"\w+", text))), asin, text) for asin, text in self._texts]
        found = sorted((row for row in scored if row[0]), key=lambda row: -row[0])
        return [Document(asin, "", text, float(score)) for score, asin, text in found[:k]]

    async def close(self) -> None:
        self.closed += 1
