"""The score by hand: every branch of the type, of attributes, options and price; the likeness of texts."""

import dataclasses

import pytest

from experiments.worlds.shopping.fuzzy import token_set_ratio
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import make_goals
from experiments.worlds.shopping.products import Product
from experiments.worlds.shopping.reward import (
    attribute_matches,
    normalize_colour,
    option_matches,
    score_purchase,
    type_score,
)
from tests.experiments.worlds.shopping.shopping_world import goal


def product(**changes) -> Product:
    values = {
        "asin": "B000000001", "title": "Norvik Men's Shirt, Slim Fit", "category": "fashion", "query": "men's shirts",
        "product_category": "Clothing › Men › Shirts", "description": "", "bullets": (), "options": (),
        "attributes": ("slim fit",), "prices": (20.0,), "price": 20.0,
    }  # fmt: skip
    return Product(**(values | changes))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("essential oils", "essential oil", 96),
        ("Powder, SNOW!", "snow powder", 100),
        ("mariners vs angels", "los angeles angels of anaheim at seattle mariners", 91),
        ("red", "blue", 29),
        ("", "red", 0),
        ("café", "caf", 100),
    ],
)
def test_token_set_ratio_by_hand(a, b, expected):
    assert token_set_ratio(a, b) == expected


def test_type_by_query_and_by_category():
    # One of ten words in common: 0.1, which is neither above 0.2 nor below 0.1.
    wanted = goal(title="shirt one two three four five six seven eight nine")
    other = product(title="shirt", query="other", product_category="Clothing › Women › Skirts")
    assert type_score(other, wanted) == 0.5
    assert type_score(dataclasses.replace(other, query="men's shirts"), wanted) == 1.0
    # Two parts of the path in common, in any order, count; a repeated one counts once.
    assert type_score(dataclasses.replace(other, product_category="Men › Clothing"), wanted) == 1.0
    assert type_score(dataclasses.replace(other, product_category="Men › Men"), wanted) == 0.5


def test_type_by_title_alone():
    other = product(query="other", product_category="other")
    wanted = goal(title="red shirt slim fit cotton")
    assert type_score(dataclasses.replace(other, title="shirt"), wanted) == 0.5  # 1 of 5 is 0.2, not above it
    assert type_score(dataclasses.replace(other, title="slim shirt"), wanted) == 1.0  # 2 of 5


def test_repeated_words_of_the_goal_count_repeatedly_in_the_whole_alone():
    other = product(title="shirt", query="other", product_category="other")
    assert type_score(other, goal(title="shirt shirt shirt shirt")) == 1.0  # 1 of 4
    assert type_score(other, goal(title="shirt shirt shirt shirt shirt")) == 0.5  # 1 of 5


def test_attributes_match_by_likeness_or_by_standing_in_a_text():
    wanted = goal(attributes=("tea tree", "essential oils", "machine wash", "slim fit", "vegan"))
    bought = product(
        attributes=("essential oil",), title="Shampoo with Tea Tree", bullets=("Machine", "Wash it"),
        description="A SLIM FIT",
    )  # fmt: skip
    # "machine wash" stands in the features put together; "vegan" stands nowhere.
    assert attribute_matches(bought, wanted) == 4
    assert attribute_matches(product(attributes=()), goal(attributes=("wool",))) == 0


def test_options_match_by_value_whatever_their_name():
    wanted = goal(options=(("color", "red"), ("size", "small")))
    assert option_matches({"color": "red", "size": "small"}, wanted) == 2
    assert option_matches({"shade": "dark red"}, wanted) == 0  # its first colour in the published order is "dark"
    assert option_matches({"shade": "brick red"}, wanted) == 1
    assert option_matches({}, wanted) == 0


def test_published_pairs_and_values_differ_where_a_colour_is_a_part_of_a_word():
    wanted = goal(options=(("color", "lightblue"),))
    assert normalize_colour("lightblue") == "blue"
    assert option_matches({"color": "lightblue"}, wanted, "pairs") == 0
    assert option_matches({"color": "lightblue"}, wanted, "values") == 1
    # A pair's name takes part in the likeness: "9 wide" and "size 9" share too little, "9 wide" and "9" all of one.
    nine = goal(options=(("size", "9"),))
    assert option_matches({"size": "9 wide"}, nine, "pairs") == 0
    assert option_matches({"size": "9 wide"}, nine, "values") == 1


def test_the_score_by_hand():
    wanted = goal(attributes=("slim fit", "wool"), options=(("color", "red"), ("size", "small")), price_upper=20.0)
    score = score_purchase(product(), {"color": "red"}, wanted)
    assert (score.type, score.attributes, score.options, score.price) == (1.0, 1, 1, True)
    assert score.total == pytest.approx(3 / 5)  # (1 + 1 + 1) / (2 + 2 + 1)
    dear = score_purchase(product(price=20.01), {"color": "red"}, wanted)
    assert not dear.price and dear.total == pytest.approx(2 / 5)
    other = score_purchase(product(title="Shirt", query="o", product_category="o"), {}, goal(title="shirt b c d e f"))
    assert other.type == 0.5  # one word of six
    assert other.total == pytest.approx(0.5 * (1 + 0 + 1) / 4)
    assert score_purchase(product(title="lamp"), {"color": "red"}, wanted).total == 0.0


@pytest.mark.parametrize("option_texts", ["pairs", "values"])
def test_every_generated_goal_can_be_reached(option_texts):
    catalogue = generate_catalogue(90, seed=5)
    for wanted in make_goals(catalogue):
        score = score_purchase(catalogue.by_asin[wanted.asin], dict(wanted.options), wanted, option_texts)
        assert score.total == 1.0, wanted
