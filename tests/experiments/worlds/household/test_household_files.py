"""Game files: those of a download listed, and what is no game refused by name. No ALFWorld needed."""

import json
from pathlib import Path

import pytest

from experiments.worlds.household.environment import Household
from experiments.worlds.household.games_on_disk import games_on_disk
from experiments.worlds.household.pddl import check_game_file
from experiments.worlds.household.problem import game_file, problem
from rollout.trajectory import Task
from tests.experiments.worlds.household.recorded import HOT_APPLE

GRAMMAR = 'grammar :: """{"task": [{"rhs": "Your task is to: UNKNOWN GOAL."}]}""";'
PLATE = "pick_clean_then_place_in_recep-Plate-None-CounterTop-2"


def write(root: Path, split: str, name: str, **changes) -> Path:
    folder = root / "json_2.1.1" / split / name / "trial_T1"
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text(json.dumps({"task_type": name.partition("-")[0]}))
    data = game_file(HOT_APPLE, "(define (domain alfred))", GRAMMAR) | changes
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not KeyError}))
    return path


def test_lists_what_alfworld_would_play_and_counts_the_rest(tmp_path):
    second = write(tmp_path, "valid_seen", "pick_two_obj_and_place-CD-None-Safe-301")
    first = write(tmp_path, "valid_seen", PLATE)
    write(tmp_path, "valid_seen", "pick_heat_then_place_in_recep-Egg-None-Fridge-1", solvable=False)
    write(tmp_path, "valid_seen", "pick_heat_then_place_in_recep-Egg-None-Fridge-2", solvable=KeyError)
    write(tmp_path, "valid_seen", "pick_and_place_with_movable_recep-Pen-Mug-Desk-301")
    write(tmp_path, "valid_seen", "pick_cool_then_place_in_recep-AppleSliced-None-Fridge-1")
    write(tmp_path, "valid_seen", "look_at_obj_in_light-CD-None-DeskLamp-301").unlink()
    write(tmp_path, "train", "look_at_obj_in_light-CD-None-DeskLamp-302")
    found = games_on_disk(tmp_path, "valid_seen")
    assert found.skipped == {"not marked as solvable": 2, "another task type": 2, "no game.tw-pddl": 1}
    assert found.tasks == (
        Task(
            f"valid_seen/{PLATE}/trial_T1",
            "put a hot apple in fridge",
            (),
            "pick_clean_then_place_in_recep",
            metadata={"household": {"file": str(first)}, "split": "valid_seen"},
        ),
        Task(
            "valid_seen/pick_two_obj_and_place-CD-None-Safe-301/trial_T1",
            "put a hot apple in fridge",
            (),
            "pick_two_obj_and_place",
            metadata={"household": {"file": str(second)}, "split": "valid_seen"},
        ),
    )
    Household(engine="alfworld").check(found.tasks)


def test_a_folder_without_games_and_an_unknown_split_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected one of train, valid_seen, valid_unseen"):
        games_on_disk(tmp_path, "test")
    with pytest.raises(ValueError, match=f"no folder {tmp_path}/json_2.1.1/train"):
        games_on_disk(tmp_path, "train")
    write(tmp_path, "train", PLATE, solvable=None)
    with pytest.raises(ValueError, match="'not marked as solvable': 1"):
        games_on_disk(tmp_path, "train")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        '{"grammar": "no task", "solvable": true}',
    ],
)
def test_a_file_that_is_no_game_is_named(tmp_path, content):
    path = write(tmp_path, "train", PLATE)
    path.write_text(content)
    with pytest.raises(ValueError, match=f"game file {path}: "):
        games_on_disk(tmp_path, "train")
    with pytest.raises(ValueError, match=f"game file {path}: "):
        check_game_file(path)


def test_a_missing_or_unsolvable_file_is_named_before_training(tmp_path):
    unsolvable = write(tmp_path, "train", PLATE, solvable=False)
    tasks = [
        Task(str(row), "", (), "pick_clean_then_place_in_recep", metadata={"household": {"file": str(path)}})
        for row, path in enumerate((tmp_path / "nowhere.tw-pddl", tmp_path, unsolvable))
    ]
    with pytest.raises(ValueError) as error:
        Household(engine="alfworld").check(tasks)
    for reason in (f"{tmp_path}/nowhere.tw-pddl: No such file", f"{tmp_path}: Is a directory", f"{unsolvable}: marked"):
        assert reason in str(error.value)


def test_the_problem_says_what_the_game_says():
    lines = problem(HOT_APPLE).splitlines()
    assert "Apple_bar_001 - object" in lines, "of two apples the engine gives the number 1 to the last"
    assert "(inReceptacle Apple_bar_001 CounterTop_bar_000)" in lines
    assert "(inReceptacle Apple_bar_000 Fridge_bar_000)" in lines
    assert "(receptacleType Sink_bar_001_bar_SinkBasin SinkBasinType)" in lines
    assert lines[-1] == (
        "(:goal (exists (?r - receptacle ?o1 - object) (and (receptacleType ?r FridgeType) (objectType ?o1 AppleType) "
        "(inReceptacle ?o1 ?r) (isHot ?o1)))))"
    )
    assert game_file(HOT_APPLE, "", GRAMMAR)["grammar"] == GRAMMAR.replace("UNKNOWN GOAL", "put a hot apple in fridge")
