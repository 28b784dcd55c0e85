"""A download of ALFWorld as question files: which games, which panel, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.household.environment import Household
from experiments.worlds.household.games_on_disk import games_on_disk
from experiments.worlds.household.problem import game_file
from experiments.worlds.household.published import ListHousehold, panel
from rollout.trajectory import Task
from tests.experiments.worlds.household.recorded import HOT_APPLE

GRAMMAR = 'grammar :: """{"task": [{"rhs": "Your task is to: UNKNOWN GOAL."}]}""";'
GAME = json.dumps(game_file(HOT_APPLE, "(define (domain alfred))", GRAMMAR))
TYPES = ("pick_heat_then_place_in_recep", "look_at_obj_in_light", "pick_two_obj_and_place")


def download(root: Path, sizes: dict[str, int]) -> Path:
    """Games of three types in turn, of every split as many as ``sizes`` says."""
    for split, count in sizes.items():
        for i in range(count):
            trial = root / "json_2.1.1" / split / f"{TYPES[i % 3]}-Apple-None-Fridge-{i}" / f"trial_T{i}"
            trial.mkdir(parents=True)
            (trial / "traj_data.json").write_text("{}")
            (trial / "game.tw-pddl").write_text(GAME)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return download(tmp_path_factory.mktemp("alfworld"), {"train": 5, "valid_seen": 12, "valid_unseen": 4})


def test_every_split_has_its_file_and_every_task_its_game(folder, tmp_path):
    figures = ListHousehold(str(folder), panel=6).run(tmp_path)
    assert {k: figures[k] for k in ("train", "val", "test_seen", "test_unseen")} == {
        "train": 5, "val": 6, "test_seen": 12, "test_unseen": 4,
    }  # fmt: skip
    for split, name in (("train", "train"), ("valid_seen", "test_seen"), ("valid_unseen", "test_unseen")):
        read = load_tasks(tmp_path / f"{name}.parquet", answers=False)
        listed = games_on_disk(folder, split).tasks
        assert [(t.id, t.question, t.data_source) for t in read] == [(t.id, t.question, t.data_source) for t in listed]
        assert [t.metadata["household"] for t in read] == [t.metadata["household"] for t in listed]
        Household(engine="alfworld").check(read)


def test_the_panel_is_drawn_once_and_is_part_of_the_test(folder, tmp_path):
    drawn = {}
    for name, seed in (("a", 0), ("again", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        ListHousehold(str(folder), panel=6, seed=seed).run(tmp_path / name)
        drawn[name] = [task.id for task in load_tasks(tmp_path / name / "val.parquet", answers=False)]
    assert drawn["a"] == drawn["again"] != drawn["b"]
    order = [task.id for task in load_tasks(tmp_path / "a" / "test_seen.parquet", answers=False)]
    assert drawn["a"] == [name for name in order if name in drawn["a"]], "in the order of the test, none twice"
    kinds = Counter(name.split("/")[1].partition("-")[0] for name in drawn["a"])
    assert kinds == dict.fromkeys(TYPES, 2)


def test_a_relative_folder_is_written_as_a_path_that_holds_everywhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    ListHousehold(folder.name, panel=1).run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Household(engine="alfworld").check(load_tasks(tmp_path / "train.parquet", answers=False))


def tasks(**sizes: int) -> list[Task]:
    return [Task(f"{source}{i}", "q", (), source) for source, count in sizes.items() for i in range(count)]


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ({"a": 5, "b": 3, "c": 2}, 7, {"a": 4, "b": 2, "c": 1}),
    ],
)
def test_task_types_keep_their_shares(sizes, size, expected):
    assert Counter(task.data_source for task in panel(tasks(**sizes), size, 0)) == expected
