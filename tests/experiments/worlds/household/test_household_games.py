import copy
import json

import pytest

from experiments.worlds.household.games import Game, Goal
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
        (["sentence"], KeyError, "game: sentence: Field required"),
        (["size"], 3, "game: size: Extra inputs .*found 3"),
        (["sentence"], 'say "#look#"', "plain punctuation"),
        (["target"], "Egg", "needs 1 objects of type 'Egg', found 0"),
        (["destination"], "Desk", "no Apple can be put into a Desk"),
        (["toggle"], "DeskLamp", "the toggle 'DeskLamp'"),
        (["receptacles"], "none", "game: receptacles: .*found 'none'"),
        (["receptacles", 0, "number"], "1", r"receptacles\[0\].number: .*found '1'"),
        (["receptacles", 4, "number"], 3, r"SinkBasin have the numbers \[1, 3\]"),
        (["objects", 0, "type"], "Pear", "unknown object types: Pear"),
        (["objects", 0, "place"], "countertop 2", "apple 1 is in 'countertop 2'"),
        (["objects", 0, "properties"], ["edible"], r"apple 1 has the properties \['edible'\]"),
    ],
)
def test_what_is_no_game_is_refused_with_what_and_where(path, value, said):
    with pytest.raises(ValueError, match=said):
        Game.from_json(changed(path, value))


def test_a_look_needs_a_lamp_and_no_destination_and_two_need_two():
    look = Goal("look_at_obj_in_light", "Mug", None, "DeskLamp")
    assert Game(look, "look at mug under the desklamp", RECEPTACLES, ITEMS).goal.treatment is None
    with pytest.raises(ValueError, match="type of a lamp that is there"):
        Game(look, "look at mug", RECEPTACLES, ITEMS[:-1])
    with pytest.raises(ValueError, match="needs 2 objects of type 'Mug', found 1"):
        Game(Goal("pick_two_obj_and_place", "Mug", "Desk", None), "put two mug in desk", RECEPTACLES, ITEMS)
