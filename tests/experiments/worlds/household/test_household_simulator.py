import dataclasses

import pytest

from experiments.worlds.household.games import Game, Goal, Receptacle
from experiments.worlds.household.simulator import Simulator
from tests.experiments.worlds.household.recorded import (
    AT_FIRST,
    AT_FRIDGE,
    HOT_APPLE,
    ITEMS,
    NOTHING,
    OPENING,
    PLAY,
    RECEPTACLES,
    WITH_KNIFE,
    item,
)


def play(game: Game, *commands: str) -> list:
    simulator = Simulator(game)
    return [simulator.reset(), *(simulator.step(command) for command in commands)]


def test_says_what_alfworld_said():
    observations = play(HOT_APPLE, *(command for command, _ in PLAY))
    assert [observation.text for observation in observations] == [OPENING, *(text for _, text in PLAY)]
    assert [observation.won for observation in observations] == [False] * len(PLAY) + [True]
    said = dict(zip([command for command, _ in PLAY], observations[1:], strict=True))
    assert observations[0].admissible == AT_FIRST
    assert said["take knife 1 from countertop 1"].admissible == WITH_KNIFE
    assert said["open fridge 1"].admissible == AT_FRIDGE


def test_winning_is_a_state_that_can_be_left():
    *_, won, lost = play(HOT_APPLE, *(command for command, _ in PLAY), "take apple 2 from fridge 1")
    assert won.won and not lost.won


def test_hot_and_cold_exclude_each_other_and_only_the_treated_one_counts():
    simulator = Simulator(HOT_APPLE)
    simulator.reset()
    heated = "go to countertop 1|take apple 1 from countertop 1|go to microwave 1|heat apple 1 with microwave 1"
    for command in f"{heated}|go to fridge 1|open fridge 1|cool apple 1 with fridge 1".split("|"):
        simulator.step(command)
    assert simulator.step("examine apple 1").text == "This is a cold apple 1."
    assert not simulator.step("move apple 1 to fridge 1").won


def test_two_have_to_come_together():
    items = tuple(item("Mug", number, "countertop 1") for number in (1, 2)) + (item("Apple", 1, "countertop 1"),)
    goal = Goal("pick_two_obj_and_place", "Mug", "SinkBasin", None)
    game = Game(goal, "put two mug in sinkbasin", RECEPTACLES, items)
    bring = "go to countertop 1|take mug {0} from countertop 1|go to sinkbasin {1}|move mug {0} to sinkbasin {1}"
    apart = bring.format(1, 1).split("|") + bring.format(2, 2).split("|")
    together = ["take mug 2 from sinkbasin 2", "go to sinkbasin 1", "move mug 2 to sinkbasin 1"]
    observations = play(game, *apart, *together)
    assert [observation.won for observation in observations] == [False] * (len(observations) - 1) + [True]


def test_the_lamp_may_be_used_before_the_object_is_held_but_has_to_be_near():
    game = Game(Goal("look_at_obj_in_light", "Mug", None, "DeskLamp"), "look at mug", RECEPTACLES, ITEMS)
    commands = "go to desk 1|use desklamp 1|go to sinkbasin 2|take mug 1 from sinkbasin 2|go to desk 1|use desklamp 1"
    assert [o.won for o in play(game, *commands.split("|"))] == [False] * 5 + [True, True]
    commands = "go to sinkbasin 2|take mug 1 from sinkbasin 2|go to desk 1|use desklamp 1|move mug 1 to desk 1"
    assert [o.won for o in play(game, *commands.split("|"))] == [False] * 4 + [True, False]


def test_what_was_sliced_says_so():
    simulator = Simulator(HOT_APPLE)
    simulator.reset()
    done = "go to countertop 1|take knife 1 from countertop 1|slice apple 1 with knife 1|move knife 1 to countertop 1"
    for command in f"{done}|take apple 1 from countertop 1".split("|"):
        simulator.step(command)
    assert simulator.step("examine apple 1").text == "This is a sliced apple 1."
    simulator.step("go to microwave 1")
    simulator.step("heat apple 1 with microwave 1")
    assert simulator.step("examine apple 1").text == "This is a hot sliced apple 1."
    simulator.step("go to fridge 1")
    simulator.step("cool apple 1 with fridge 1")
    assert simulator.step("examine apple 1").text == "This is a cool sliced apple 1."
    simulator.step("go to sinkbasin 1")
    simulator.step("clean apple 1 with sinkbasin 1")
    assert simulator.step("examine apple 1").text == "This is a cool and clean sliced apple 1."


def test_lists_are_in_the_order_of_identifiers_numbers_from_the_end():
    kinds = ("Pencil", "Pen", "Pen", "Pot", "Potato", "CD", "CellPhone")
    items = tuple(item(kind, kinds[: row + 1].count(kind), "countertop 1") for row, kind in enumerate(kinds))
    goal = Goal("pick_and_place_simple", "Pen", "Desk", None)
    seen = play(Game(goal, "put a pen in desk", RECEPTACLES, items), "go to countertop 1")[1].text
    assert seen == (
        "You arrive at countertop 1. On the countertop 1, you see a cd 1, a cellphone 1, a pen 2, a pen 1, a pencil 1, "
        "a pot 1, and a potato 1."
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go to fridge 2",
        "look\nlook",
        "\x00",
        "put apple 1 in/on fridge 1",
        "{r.name}",
    ],
)
def test_what_is_not_possible_changes_nothing(text):
    first, after = play(HOT_APPLE, text)
    assert after == dataclasses.replace(first, text=NOTHING)


def test_a_receptacle_that_cannot_be_opened_shows_what_is_on_it():
    opened = tuple(Receptacle(r.type, r.number, False) for r in RECEPTACLES)
    game = dataclasses.replace(HOT_APPLE, receptacles=opened)
    assert play(game, "go to fridge 1")[1].text == "You arrive at fridge 1. On the fridge 1, you see a apple 2."
