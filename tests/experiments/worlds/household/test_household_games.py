import copy
import json

import pytest

from experiments.worlds.household.games import Game, Goal, Receptacle
from tests.experiments.worlds.household.recorded import HOT_APPLE, ITEMS, RECEPTACLES


def changed(path: list, value) -> dict:
    data = copy.deepcopy(HOT_APPLE.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


def test_a_game_goes_through_json_and_comes_back_equal():
    assert Game.from_json(json.loads(json.dumps(HOT_APPLE.to_json()))) == HOT_APPLE


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["sentence"], KeyError, "game.sentence: Field required"),
        (["size"], 3, "game.size is 3: Extra inputs"),
        (["sentence"], None, "game.sentence is None"),
        (["sentence"], 'say "#look#"', "plain punctuation"),
        (["sentence"], "put an apple; then wait", "plain punctuation"),  # ALFWorld's grammar ends there
        (["sentence"], "", "plain punctuation"),
        (["task_type"], "pick_up", "expected one of pick_and_place_simple"),
        (["target"], "Egg", "needs 1 objects of type 'Egg', found 0"),
        (["destination"], "Toilet", "'Toilet'"),
        (["destination"], "Desk", "no Apple can be put into a Desk"),
        (["toggle"], "DeskLamp", "the toggle 'DeskLamp'"),
        (["receptacles"], [], "at least one receptacle"),
        (["receptacles"], "none", "game.receptacles is 'none'"),
        (["receptacles", 0], ["CounterTop", 1], r"receptacles\[0\] is"),
        (["receptacles", 0, "number"], "1", r"receptacles\[0\].number is '1'"),
        (["receptacles", 0, "number"], True, r"receptacles\[0\].number is True"),
        (["receptacles", 4, "number"], 3, r"SinkBasin have the numbers \[1, 3\]"),
        (["receptacles", 0, "type"], "Counter", "unknown receptacle types: Counter"),
        (["objects", 0, "type"], "Pear", "unknown object types: Pear"),
        (["objects", 0, "number"], 2, r"Apple have the numbers \[2, 2\]"),
        (["objects", 0, "place"], "countertop 2", "apple 1 is in 'countertop 2'"),
        (["objects", 0, "properties"], ["edible"], r"apple 1 has the properties \['edible'\]"),
        (["objects", 0, "properties"], [1], r"objects\[0\].properties\[0\] is 1"),
        (["objects", 0, "colour"], "red", r"objects\[0\].colour is 'red'"),
    ],
)
def test_what_is_no_game_is_refused_with_what_and_where(path, value, said):
    with pytest.raises(ValueError, match=said):
        Game.from_json(changed(path, value))


@pytest.mark.parametrize("data", [None, [], "game", 3])
def test_what_is_no_mapping_is_refused(data):
    with pytest.raises(ValueError, match="^game is "):
        Game.from_json(data)


def test_a_look_needs_a_lamp_and_no_destination_and_two_need_two():
    look = Goal("look_at_obj_in_light", "Mug", None, "DeskLamp")
    assert Game(look, "look at mug under the desklamp", RECEPTACLES, ITEMS).goal.treatment is None
    with pytest.raises(ValueError, match="type of a lamp that is there"):
        Game(look, "look at mug", RECEPTACLES, ITEMS[:-1])
    with pytest.raises(ValueError, match="needs 2 objects of type 'Mug', found 1"):
        Game(Goal("pick_two_obj_and_place", "Mug", "Desk", None), "put two mug in desk", RECEPTACLES, ITEMS)


def test_names_are_types_in_lower_case_with_numbers():
    assert Receptacle("CounterTop", 12, False).name == "countertop 12"
