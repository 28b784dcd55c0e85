"""Shops as stages: goals split, the catalogue and the texts they belong to, WebShop's files and generated ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.shopping.build import BuildShop, ListWebShop
from experiments.worlds.shopping.catalogue import load_catalogue
from experiments.worlds.shopping.environment import Shopping
from experiments.worlds.shopping.goals import goal_of, make_goals
from tests.experiments.worlds.shopping.shopping_world import WordRetriever, write_files


def published(folder: Path) -> dict[str, str]:
    """WebShop's files, with options enough for ten synthetic goals (2 colours x 2 sizes x 2 fits, and two more)."""
    files = write_files(folder)
    items = json.loads(files["items"].read_text())
    items[0]["customization_options"]["Fit"] = [{"value": "slim"}, {"value": "wide"}]
    items[1]["customization_options"] = {"Scent": [{"value": "tea"}, {"value": "mint"}]}
    files["items"].write_text(json.dumps(items))
    return {"items": str(files["items"]), "attributes": str(files["attributes"])}


@pytest.fixture
def webshop(tmp_path) -> ListWebShop:
    return ListWebShop(**published(tmp_path), evaluation=6, panel=3)


def test_the_first_goals_of_the_shuffled_list_are_the_test(webshop, tmp_path):
    figures = webshop.run(tmp_path)
    goals = make_goals(webshop.catalogue())
    assert len(goals) == 10 and figures == {
        "products": 3, "train": 4, "val": 3, "test": 6,
        **{c: sum(g.category == c for g in goals[6:]) for c in {g.category for g in goals[6:]}},
    }  # fmt: skip
    train, val, test = (load_tasks(tmp_path / f"{name}.parquet", answers=False) for name in ("train", "val", "test"))
    assert [goal_of(task) for task in test] == goals[:6] and [goal_of(task) for task in train] == goals[6:]
    assert [task.metadata["index"] for task in [*test, *train]] == list(range(10)), "a WebShop server's numbers"
    assert [task.data_source for task in test] == [goal.category for goal in goals[:6]]
    assert val == [task for task in test if task.id in {t.id for t in val}]


def test_the_panel_depends_on_the_seed_alone(tmp_path):
    files = published(tmp_path)
    panels = []
    for seed in (0, 0, 1, 2):
        shop = ListWebShop(**files, evaluation=6, panel=3, seed=seed)
        panels.append([task.metadata["index"] for task in shop.splits(shop.catalogue())["val"]])
    assert panels[0] == panels[1] and len({tuple(p) for p in panels}) > 1


@pytest.mark.parametrize("generated", [True, False])
def test_the_tasks_can_be_played_over_what_was_written(tmp_path, generated):
    shop = (
        BuildShop(size=24, val=2, test=2, demonstrations=2, articles=2)
        if generated
        else ListWebShop(**published(tmp_path), evaluation=6, panel=3)
    )
    shop.run(tmp_path)
    catalogue = load_catalogue(tmp_path / "catalogue.jsonl")
    assert catalogue.fingerprint == shop.catalogue().fingerprint
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert [line["id"] for line in corpus] == [product.asin for product in catalogue.products]

    async def visit() -> str:
        factory = Shopping(str(tmp_path / "catalogue.jsonl"), WordRetriever(catalogue))
        await factory.start()
        try:
            return (await factory(load_tasks(tmp_path / "val.parquet", answers=False)[0]).reset()).text
        finally:
            await factory.close()

    assert load_tasks(tmp_path / "val.parquet", answers=False)[0].question in asyncio.run(visit())


def test_a_generated_shop_s_splits_share_no_goal(tmp_path):
    figures = BuildShop(size=24, val=3, test=4, demonstrations=5, articles=2).run(tmp_path)
    goals = make_goals(load_catalogue(tmp_path / "catalogue.jsonl"))
    numbers = []
    for name, count in (("val", 3), ("test", 4), ("demonstrations", 5), ("train", len(goals) - 12)):
        split = load_tasks(tmp_path / f"{name}.parquet", answers=False)
        assert figures[name] == len(split) == count
        assert all(goal_of(task) == goals[task.metadata["index"]] for task in split)
        numbers += [task.metadata["index"] for task in split]
    assert sorted(numbers) == list(range(len(goals)))
