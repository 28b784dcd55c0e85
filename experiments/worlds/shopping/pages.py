"""The shop's pages as text observations, with what can be clicked on them.

A page is WebShop's "text" observation of its HTML (web_agent_text_env.py, ``convert_html_to_text`` with
``simple=True``): the visible texts in document order, joined by " [SEP] ". The list of what can be clicked has buttons
before links and links before options, in lower case. The page does not show the chosen options. The page after buying
omits published fields that an ended episode does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.worlds.shopping.products import Product

SEPARATOR = " [SEP] "
PAGE_SIZE = 10  # products on a page of results
SEARCH, RESULTS, ITEM, SUB_PAGE, END = "search", "results", "item", "item_sub_page", "end"  # names of pages
BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
DESCRIPTION, FEATURES, REVIEWS = "Description", "Features", "Reviews"
SUB_PAGES = {name.lower(): name for name in (DESCRIPTION, FEATURES, REVIEWS)}
QUERY_FORM = "search[<your query>]"
THANKS = "Thank you for shopping with us!"
SCORE_LABEL = "Your score (min 0.0, max 1.0)"


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    texts: tuple[str, ...]
    clickables: tuple[str, ...] = ()  # in lower case, without the search button
    has_search_bar: bool = False

    @property
    def text(self) -> str:
        return SEPARATOR.join(self.texts)

    @property
    def info(self) -> dict[str, Any]:
        """The page's facts for prompts: {"admissible": ["click[buy now]", ...], "has_search_bar": False, "page":
        "item"}.
        """
        admissible = [QUERY_FORM] if self.has_search_bar else []
        admissible += [f"click[{label}]" for label in self.clickables]
        return {"admissible": admissible, "has_search_bar": self.has_search_bar, "page": self.name}


def parse_action(text: str) -> tuple[str, str | None]:
    r"""Split an action such as ``search[Red shoes]`` into ("search", "Red shoes"). Other texts are returned as (text,
    None).

    Equals the published pattern ``(.+)\[(.+)\]`` at the start of the text (engine.py, ``parse_action``), in linear
    time. Only the first line counts, the argument begins after the last possible "[", and text after its "]" is
    ignored.

    >>> parse_action("click[Buy Now]"), parse_action("look around")
    (('click', 'Buy Now'), ('look around', None))
    """
    line = text.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, end - 1) if end > 2 else -1
    return (line[:start], line[start + 1 : end]) if start > 0 else (text, None)


def _distinct(labels: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(labels))


def _headed(instruction: str, *texts: str) -> tuple[str, ...]:
    return ("Instruction:", instruction.strip(), BACK, *texts)


def search_page(instruction: str) -> Page:
    return Page(SEARCH, ("WebShop", "Instruction:", instruction.strip(), "Search"), has_search_bar=True)


def results_page(instruction: str, products: Sequence[Product], number: int, total: int) -> Page:
    """Return page ``number`` (from 1) of the search results. ``total`` counts the products found. As published, "Next
    >" is always there, and the page after the last is empty.
    """
    turns = (NEXT,) if number == 1 else (PREVIOUS, NEXT)
    shown = [text for p in products for text in (p.asin, p.title.strip(), p.price_tag) if text]
    labels = [BACK, *turns, *(product.asin for product in products)]
    texts = _headed(instruction, f"Page {number} (Total results: {total})", *turns, *shown)
    return Page(RESULTS, texts, _distinct([label.lower() for label in labels]))


def item_page(instruction: str, product: Product) -> Page:
    choices = [text.strip() for option in product.options for text in (option.name, *option.values)]
    below = [DESCRIPTION, FEATURES, REVIEWS, BUY]
    title = [product.title.strip()] if product.title.strip() else []
    texts = _headed(instruction, PREVIOUS, *choices, *title, f"Price: {product.price_tag}", "Rating: N.A.", *below)
    labels = [label.lower() for label in (BACK, PREVIOUS, *below)]
    return Page(ITEM, texts, _distinct([*labels, *(v for option in product.options for v in option.values)]))


def sub_page(instruction: str, product: Product, which: str) -> Page:
    """Return the product's description, features or reviews page, by its name in ``SUB_PAGES``."""
    contents: Mapping[str, Sequence[str]] = {
        DESCRIPTION: [product.description.strip()] if product.description.strip() else [],
        FEATURES: [bullet.strip() for bullet in product.bullets],
        REVIEWS: ["No reviews found"],  # the published engine does not read reviews
    }
    texts = _headed(instruction, PREVIOUS, *contents[which])
    return Page(SUB_PAGE, texts, (BACK.lower(), PREVIOUS.lower()))


def end_page(score: float) -> Page:
    return Page(END, (THANKS, SCORE_LABEL, str(score)))
