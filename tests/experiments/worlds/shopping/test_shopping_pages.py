"""Pages as the published text observation shows them, and what an action's text means."""

import random
import re

import pytest

from experiments.worlds.shopping import pages
from tests.experiments.worlds.shopping.shopping_world import published_catalogue


@pytest.fixture
def products(tmp_path):
    return published_catalogue(tmp_path).products


def test_results(products):
    first = pages.results_page("find", products[:2], 1, 12)
    assert first.text == (
        "Instruction: [SEP] find [SEP] Back to Search [SEP] Page 1 (Total results: 12) [SEP] Next > [SEP] B000000001 "
        "[SEP] Norvik Men's Shirt, Slim Fit [SEP] $19.99 [SEP] B000000002 [SEP] Tamrose Shampoo [SEP] $9.98 to $16.98"
    )
    assert first.info == {
        "admissible": ["click[back to search]", "click[next >]", "click[b000000001]", "click[b000000002]"],
        "has_search_bar": False, "page": "results",
    }  # fmt: skip
    second = pages.results_page("find", [], 2, 12)
    assert second.text.endswith("Back to Search [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] Next >")
    assert second.clickables == ("back to search", "< prev", "next >")


def test_an_item(products):
    page = pages.item_page("find", products[0])
    assert page.text == (
        "Instruction: [SEP] find [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] light | blue [SEP] red [SEP] size "
        "[SEP] small [SEP] x-large [SEP] Norvik Men's Shirt, Slim Fit [SEP] Price: $19.99 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert page.info["admissible"] == [
        "click[back to search]", "click[< prev]", "click[description]", "click[features]", "click[reviews]",
        "click[buy now]", "click[light | blue]", "click[red]", "click[small]", "click[x-large]",
    ]  # fmt: skip


def test_sub_pages(products):
    head = "Instruction: [SEP] find [SEP] Back to Search [SEP] < Prev"
    shirt, shampoo, _ = products
    assert pages.sub_page("find", shirt, "Description").text == f"{head} [SEP] A light shirt."
    assert pages.sub_page("find", shampoo, "Description").text == head  # it has none
    features = pages.sub_page("find", shirt, "Features")
    assert features.text == f"{head} [SEP] 100% Cotton [SEP] Machine Wash"
    assert (features.name, features.clickables) == ("item_sub_page", ("back to search", "< prev"))
    assert pages.sub_page("find", shirt, "Reviews").text == f"{head} [SEP] No reviews found"


def published_parse(text):
    """The pattern of web_agent_site/engine/engine.py, which takes a time that grows with the square of the length."""
    found = re.match(r"(.+)\[(.+)\]", text)
    return found.groups() if found else (text, None)


def test_an_action_is_read_as_by_the_published_pattern():
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab[]] [\n", k=rng.randint(0, 9))) for _ in range(20_000)]
    texts += ["search[red shoes]", "click[a] and more", "click[a[b]c]", "[x]", "click[]", "click[ ]", "a[b", "\n[a]"]
    assert [pages.parse_action(text) for text in texts] == [published_parse(text) for text in texts]
    assert sum(pages.parse_action(text)[1] is not None for text in texts) > 1000
