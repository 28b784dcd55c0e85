"""Goals as published: sentences, price limits, order and splits; and as tasks."""

import json
import random
import re

import pytest

from experiments.worlds.shopping.catalogue import Catalogue
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import Goal, as_task, goal_of, make_goals, split_goals
from experiments.worlds.shopping.products import Instruction, Option, Product
from tests.experiments.worlds.shopping.shopping_world import goal


def product(price: float = 15.0, **changes) -> Product:
    values = {
        "asin": "B1", "title": "Shirt", "category": "fashion", "query": "shirts", "product_category": "a › b",
        "description": "", "bullets": (), "options": (), "attributes": ("soft",), "prices": (price,), "price": price,
        "synthetic": Instruction("Find me soft shirts", ("soft",)),
    }  # fmt: skip
    return Product(**(values | changes))


def limits(price: float) -> set[float]:
    return {make_goals(Catalogue([product(price)]), seed=seed)[0].price_upper for seed in range(60)}


def test_synthetic_goals_combine_options_in_the_order_of_their_names():
    options = (Option("size", ("small", "large")), Option("color", ("red", "blue")))
    goals = make_goals(Catalogue([product(options=options)]))
    limit = goals[0].price_upper
    tail = f", and price lower than {limit:.2f} dollars"
    assert {g.instruction for g in goals} == {
        f"Find me soft shirts with color: {color}, and size: {size}{tail}"
        for color in ("red", "blue") for size in ("small", "large")
    }  # fmt: skip
    assert all(dict(g.options) == dict(re.findall(r"(\w+): (\w+)", g.instruction)) for g in goals)
    assert {(g.attributes, g.price_upper, g.title) for g in goals} == {(("soft",), limit, "Shirt")}


def test_the_order_is_that_of_the_published_seed():
    catalogue = generate_catalogue(6, seed=2)
    ordered = [g for p in catalogue.products for g in sorted(make_goals(Catalogue([p])), key=lambda g: g.instruction)]
    shuffled = make_goals(catalogue)
    assert sorted(shuffled, key=repr) == sorted(ordered, key=repr)
    places = list(range(len(shuffled)))
    random.seed(233)  # as web_agent_text_env.py does it
    random.shuffle(places)
    before = dict(zip(places, shuffled, strict=True))
    assert [before[n].asin for n in range(len(before))] == [g.asin for p in catalogue.products for g in ordered
                                                            if g.asin == p.asin]  # fmt: skip


def test_splits():
    goals = [goal(instruction=str(n)) for n in range(1501)]
    published = split_goals(goals)
    assert {name: len(part) for name, part in published.items()} == {"evaluation": 500, "train": 1001}
    assert published["evaluation"] == goals[:500] and published["train"] == goals[500:]
    with pytest.raises(ValueError, match="1501 goals, 1501 of them held out, leave none for training"):
        split_goals(goals, evaluation=1501)
    with pytest.raises(ValueError, match="evaluation is -1"):
        split_goals(goals, evaluation=-1)


@pytest.mark.parametrize("options", [(("color", "red"),), ()])
def test_a_task_carries_its_goal_as_plain_json(options):
    wanted = goal(options=options)
    task = as_task(wanted, 7, "train")
    assert (task.id, task.question, task.data_source) == ("shopping-train-7", "find me a shirt", "fashion")
    assert task.metadata["index"] == 7
    plain = json.loads(json.dumps(task.metadata["shopping"]))
    assert Goal.from_json(plain) == goal_of(task) == wanted


def test_what_is_no_goal_is_told():
    task = as_task(goal(), 0, "train")
    with pytest.raises(ValueError, match="shopping-train-0: its metadata has no 'shopping'"):
        goal_of(type(task)(task.id, "", (), ""))
    with pytest.raises(ValueError, match=r"no goal of the shop \(goal: instruction: Field required"):
        Goal.from_json({"asin": "B1"})
    for name, wrong in (("title", None), ("price_upper", "20"), ("attributes", ["soft", 3]), ("options", {"size": 7})):
        with pytest.raises(
            ValueError, match=rf"no goal of the shop \(goal: {name}.* found .*write the tasks with goals.as_task"
        ):
            Goal.from_json(goal().to_json() | {name: wrong})
    with pytest.raises(ValueError, match="1 products without one synthetic instruction"):
        make_goals(Catalogue([product(synthetic=None)]))
    with pytest.raises(ValueError, match="B1: its instruction has no attribute"):
        make_goals(Catalogue([product(synthetic=Instruction("soft", ()))]))
