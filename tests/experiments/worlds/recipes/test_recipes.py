"""The workshop's orders and skills, and its expert in real episodes."""

import re

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.recipes.build import BuildRecipes, read_recipe
from experiments.worlds.recipes.environment import Recipes
from experiments.worlds.recipes.expert import DemonstratedRecipe, RecipeExpertEngine
from rollout.engines.base import SamplingParams
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.injection import Skills
from rollout.skills.reading import read_bank
from rollout.system import RolloutSystem

SPLITS = ("demonstrations", "train", "val", "test")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    summary = BuildRecipes(train=32, val=16, test=16, demonstrations=400).run(folder)
    return folder, summary, {name: load_tasks(folder / f"{name}.parquet", answers=False) for name in SPLITS}


def test_orders_ask_for_the_banks_recipes_and_demonstrations_for_others(world):
    _, summary, splits = world
    assert {name: len(tasks) for name, tasks in splits.items()} == {name: summary[name] for name in SPLITS}
    questions = [task.question for tasks in splits.values() for task in tasks]
    assert len(set(questions)) == len(questions) == 464
    bank = read_bank("recipes_tiny").by_category
    for name in ("train", "val", "test"):
        for task in splits[name]:
            product = re.match(r"make (\w+), order \d{4}\. step 1$", task.question)[1]
            assert task.metadata["recipe"] == re.findall(r"step \d (\w+)", bank[product][0].principle)
            assert not any(device in task.question for device in task.metadata["recipe"])
        assert len({task.metadata["product"] for task in splits[name]}) == 16
    drawn = [task.metadata["recipe"] for task in splits["demonstrations"]]
    known = [read_recipe(bank[task.metadata["product"]][0]) for task in splits["demonstrations"]]
    same = sum(a == b for a, b in zip(drawn, known, strict=True))
    assert same < 10 and {len(set(recipe)) for recipe in drawn} == {3}, "of 336 recipes each is as likely"
    shown = sum(task.metadata["shown"] for task in splits["demonstrations"])
    assert 160 < shown < 240


def test_the_expert_follows_what_it_is_shown_and_guesses_else(world):
    folder, _, splits = world
    tokenizer, files = str(folder / "tokenizer"), [str(folder / "demonstrations.parquet")]
    tasks = splits["demonstrations"]
    made = {}
    for error_rate in (0.0, 0.3):
        rollouts = RolloutSystem(
            engine=RecipeExpertEngine(tokenizer, files, error_rate),
            protocol=EpisodeProtocol(tokenizer, texts="bare", window=None, require_thinking=False),
            environment=Recipes(),
            skills=Skills("recipes_tiny", DemonstratedRecipe(), max_tokens=512, form="sentences", header=""),
            max_turns=6,
            final_turn=False,
        )
        try:
            made[error_rate] = rollouts.rollout(tasks, sampling=SamplingParams(max_new_tokens=20), seed=0)
        finally:
            rollouts.close()
    for careful, careless in zip(made[0.0], made[0.3], strict=True):
        recipe = ", ".join(f"step {i} {device}" for i, device in enumerate(careful.task.metadata["recipe"], 1))
        assert (recipe in careful.task.skills) == careful.task.metadata["shown"] == bool(careless.task.skills)
        if careful.task.skills:
            assert careful.reward.total == 1.0 and len(careful.turns) == 3
    part = [t.reward.total for t in made[0.0] if not t.task.skills]
    assert 0 < sum(part) < 0.12 * len(part), "three of six guesses, each right once in eight: one in 34"
    part = [len(t.turns) for t in made[0.3] if t.task.skills]
    assert 3.2 < sum(part) / len(part) < 5.0
    guesses = {call.request.arguments["action"] for t in made[0.0] if not t.task.skills for call in t.calls}
    assert len({guess.split()[2] for guess in guesses}) == 8
