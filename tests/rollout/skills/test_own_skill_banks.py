"""The banks that the package ships: what they hold, and that what they say can be done."""

import json
import re

import pytest

from experiments.worlds.shopping.assortment import KINDS
from rollout.skills.reading import OWN_BANKS, read_bank

NAMES = ["household", "household_tiny", "recipes_tiny", "search", "shopping", "shopping_tiny"]
SIZES = {
    "household": (
        12,
        {"pick_and_place": 5, "look_at_obj_in_light": 5, "clean": 6, "heat": 5, "cool": 5, "examine": 6},
    ),
    "shopping": (
        15,
        {
            "apparel": 6, "footwear": 5, "home_decor": 6, "electronics": 6, "accessories": 5, "beauty_health": 5,
            "other": 6,
        },
    ),
    "search": (
        10,
        {"direct_retrieval": 5, "multi_hop_reasoning": 5, "entity_attribute_lookup": 5, "compare": 5},
    ),
}  # fmt: skip
HOUSEHOLD_TYPES = {
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_they_are_as_large_as_the_published_ones(name):
    bank, (general, by_category) = read_bank(name), SIZES[name]
    assert len(bank.general) == general
    assert {category: len(skills) for category, skills in bank.by_category.items()} == by_category


@pytest.mark.parametrize("name", NAMES)
def test_no_skill_stands_twice_and_each_completes_the_sentence(name):
    bank = read_bank(name)
    skills = [*bank.general, *(skill for skills in bank.by_category.values() for skill in skills)]
    assert len({skill.principle for skill in skills}) == len(skills)
    for skill in skills:
        assert skill.principle.endswith(".") and not skill.when_to_apply.endswith("."), skill.id
        assert skill.when_to_apply.split()[0] in {"when", "before", "after", "while", "right", "on", "always"}, skill.id


@pytest.mark.parametrize("name", ["household", "household_tiny"])
def test_household_banks_know_every_task_type(name):
    assert read_bank(name).tasks.keys() == HOUSEHOLD_TYPES


@pytest.mark.parametrize("name", ["household", "household_tiny"])
def test_household_actions_are_those_of_alfworld_0_4(name):
    """There "move X to R" puts down; the older "put X in/on R" is answered with "Nothing happens."."""
    values = json.loads((OWN_BANKS / f"{name}.json").read_text())
    text = json.dumps([values["general_skills"], values["task_specific_skills"]])
    assert "move" in text and not re.search(r"put \w+ (\d+ )?in/?on|toggle|slice", text)
    if name == "household":
        quoted = set(re.findall(r'\\"([a-z][^"\\]*)\\"', text))
        assert quoted == {
            "move mug 1 to desk 2", "use desklamp 1", "clean X with sinkbasin 1", "heat X with microwave 1",
            "cool X with fridge 1", "inventory",
        }  # fmt: skip


def test_the_tiny_shopping_bank_knows_every_category_of_the_generated_shop():
    assert read_bank("shopping_tiny").tasks.keys() == KINDS.keys() == read_bank("shopping_tiny").keywords.keys()
    for category, keywords in read_bank("shopping_tiny").keywords.items():
        for kinds, sold in KINDS.items():
            named = [any(word in kind.phrase for word in keywords) for kind in sold]
            assert all(named) if kinds == category else not any(named), (category, kinds)


@pytest.mark.parametrize("name", ["household_tiny", "shopping_tiny"])
def test_the_tiny_bank_is_tiny(name):
    """A tiny model has read few words, and has a short context."""
    bank = read_bank(name)
    assert sum(len(skill.principle.split()) for skill in bank.general) <= 15
    for skills in bank.by_category.values():
        assert sum(len(skill.principle.split()) for skill in skills) <= 25
    said = " ".join(skill.principle for skills in (bank.general, *bank.by_category.values()) for skill in skills)
    assert len(set(re.findall(r"\w+", said))) < 50


def test_the_search_bank_knows_the_data_sets():
    tasks = read_bank("search").tasks
    assert tasks["nq"] == tasks["triviaqa"] == "direct_retrieval" and tasks["popqa"] == "entity_attribute_lookup"
    for source in ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "fictional_2hop", "fictional_3hop"):
        assert tasks[source] == "multi_hop_reasoning"
