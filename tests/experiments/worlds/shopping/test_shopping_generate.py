"""The generated shop is the same for the same seed, of any size, and fair; the expert knows its way."""

import itertools
import random

import pytest

from experiments.worlds.shopping.assortment import ATTRIBUTES, KINDS
from experiments.worlds.shopping.expert import PAGES, ShoppingExpert, query_words
from experiments.worlds.shopping.fuzzy import token_set_ratio
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import as_task, make_goals
from experiments.worlds.shopping.reward import MATCH_ABOVE, normalize_colour, option_matches
from tests.experiments.worlds.shopping.shopping_world import goal


def test_the_same_seed_gives_the_same_shop():
    state = random.getstate()
    assert generate_catalogue(50, seed=7).products == generate_catalogue(50, seed=7).products
    assert generate_catalogue(50, seed=7).fingerprint != generate_catalogue(50, seed=8).fingerprint
    assert random.getstate() == state  # nobody else's numbers are drawn


def test_products_hold_together():
    for product in generate_catalogue(200, seed=1).products:
        assert len(product.asin) == 10 and product.asin.isdigit() is False
        assert len(set(product.attributes)) == 4 and product.attributes[:2] == product.synthetic.attributes
        assert all(a in product.title.lower() and a in product.synthetic.text for a in product.synthetic.attributes)
        assert product.title == product.title.strip() and "  " not in product.synthetic.text
        assert all(2 <= len(option.values) <= 3 for option in product.options)
        assert product.prices == (product.price,) and product.price == round(product.price, 2)
        written = f"{product.description} {' '.join(product.bullets)}".lower()
        assert all(attribute in written for attribute in product.attributes)


def test_a_tiny_shop_has_a_small_closed_vocabulary():
    small = generate_catalogue(48, seed=0, asin_digits=3, brands=8)
    assert all(len(product.asin) == 4 for product in small.products)
    words = {
        word
        for wanted in make_goals(small)
        for word in f"{wanted.instruction} {wanted.title}".lower().replace(",", " ").replace(":", " ").split()
    }
    assert len(words) < 250


def alike(texts):
    return [pair for pair in itertools.permutations(texts, 2) if token_set_ratio(*pair) > MATCH_ABOVE]


def test_the_score_never_takes_one_attribute_or_value_for_another():
    for attributes in ATTRIBUTES.values():
        assert alike(attributes) == []
    for kind in itertools.chain(*KINDS.values()):
        values = [value for option in kind.options for value in option.values]
        assert len(set(values)) == len(values)
        assert [normalize_colour(value) for value in values] == values and alike(values) == []


@pytest.mark.parametrize("option_texts", ["pairs", "values"])
def test_just_the_right_options_match(option_texts):
    for wanted in make_goals(catalogue := generate_catalogue(36, seed=2)):
        names = [option.name for option in catalogue.by_asin[wanted.asin].options]
        for values in itertools.product(*(option.values for option in catalogue.by_asin[wanted.asin].options)):
            chosen = dict(zip(names, values, strict=True))
            right = sum(chosen[name] == value for name, value in wanted.options)
            assert option_matches(chosen, wanted, option_texts) == right, (chosen, wanted)


def test_the_experts_query_is_the_instruction_without_its_frame():
    wanted = goal(
        instruction="i am looking for a pair of boots with wide fit and lace up with color: red, and size: 11, and "
        "price lower than 120.00 dollars",
        options=(("color", "red"), ("size", "11")),
    )
    assert query_words(wanted) == "boots wide fit lace up red 11"


def info(page, *labels):
    return {"page": page, "admissible": [f"click[{label}]" for label in labels], "has_search_bar": page == "search"}


def test_the_expert_step_by_step():
    task, expert = as_task(goal(), 0, "train"), ShoppingExpert()
    past = [expert.next_action(task, info("search"), [])]
    assert past == ["search[shirt]"]
    page = ("back to search", "next >", "b1")
    for _ in range(PAGES - 1):
        past.append(expert.next_action(task, info("results", *page), past))
        assert past[-1] == "click[next >]"  # not on this page of results
    past.append(expert.next_action(task, info("results", *page), past))
    assert past[-1] == "search[norvik men's shirt, slim fit]"  # not on any page that it looks at
    past.append(expert.next_action(task, info("results", *page, "b000000001"), past))
    assert past[-1] == "click[b000000001]"
    item = info("item", "back to search", "< prev", "description", "buy now", "red", "blue", "small")
    for expected in ("click[red]", "click[small]", "click[buy now]"):
        past.append(expert.next_action(task, item, past))
        assert past[-1] == expected
    assert expert.next_action(task, info("item_sub_page", "back to search", "< prev"), past) == "click[< prev]"


def test_a_careless_expert_slips_as_often_as_it_should_and_always_at_the_same_tasks():
    item = info("item", "back to search", "< prev", "features", "buy now", "red", "blue", "small", "large")
    tasks = [as_task(goal(), n, "train") for n in range(400)]

    def first(expert):
        return [expert.next_action(task, item, ["search[x]", "click[b000000001]"]) for task in tasks]

    choices = first(ShoppingExpert(error_rate=0.25, seed=1))
    slipped = [choice for choice in choices if choice != "click[red]"]
    assert set(slipped) == {"click[blue]", "click[large]"} and 70 <= len(slipped) <= 130
    assert choices == first(ShoppingExpert(error_rate=0.25, seed=1)) != first(ShoppingExpert(error_rate=0.25, seed=2))
    assert set(first(ShoppingExpert())) == {"click[red]"}
