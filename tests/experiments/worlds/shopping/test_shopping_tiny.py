"""The generated shop for tiny models: its words, its texts, and the expert whose visits a model learns from."""

from __future__ import annotations

import random

import pytest

from data_modules.datasets.questions import load_tasks
from data_modules.demonstrations.generate_trajectories import is_right
from experiments.worlds.shopping import pages
from experiments.worlds.shopping.build import BuildShop
from experiments.worlds.shopping.catalogue import load_catalogue
from experiments.worlds.shopping.environment import Shopping
from experiments.worlds.shopping.expert import ShoppingExpertEngine, page_facts
from experiments.worlds.shopping.generate import generate_catalogue
from experiments.worlds.shopping.goals import goal_of, make_goals
from experiments.worlds.shopping.texts import label, visited
from rollout.engines.base import SamplingParams
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.injection import Skills
from rollout.skills.retrieval import TaskType
from rollout.storage import load_trajectories
from rollout.system import RolloutSystem
from rollout.tokenizer import load_tokenizer
from tests.experiments.worlds.shopping.shopping_world import WordRetriever

SIZES = {"size": 90, "val": 4, "test": 4, "demonstrations": 60, "articles": 6}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    BuildShop(**SIZES).run(folder)
    return folder


def system(world, error_rate, skills=None):
    tokenizer, catalogue = str(world / "tokenizer"), world / "catalogue.jsonl"
    protocol = EpisodeProtocol(tokenizer, texts="bare", window=None, require_thinking=False)
    engine = ShoppingExpertEngine(tokenizer, [str(world / "demonstrations.parquet")], error_rate)
    shop = Shopping(str(catalogue), WordRetriever(load_catalogue(catalogue)), topk=3)
    return RolloutSystem(
        engine, protocol, shop, max_turns=8, max_turn_tokens=32, max_observation_tokens=160, max_response_tokens=896,
        final_turn=False, skills=skills,
    )  # fmt: skip


def visits(world, error_rate, tasks, **options):
    rollouts = system(world, error_rate, **options)
    try:
        return rollouts.rollout(tasks, sampling=SamplingParams(max_new_tokens=32), seed=0), rollouts.protocol
    finally:
        rollouts.close()


def test_every_word_of_the_shop_is_one_token(world):
    tokenizer = load_tokenizer(str(world / "tokenizer"))
    for text in (" shoes", " lavender", " [", "[black", " 42", "action"):
        found = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert found == 1, (text, found)
    wanted = load_tasks(world / "test.parquet", answers=False)[0].question.partition(", and price")[0]
    assert len(tokenizer(wanted, add_special_tokens=False).input_ids) <= len(wanted.split()) + wanted.count(":") + 3


@pytest.mark.slow
def test_same_seed_same_texts_which_are_of_another_shop(world, tmp_path):
    BuildShop(**SIZES).run(tmp_path)
    assert load_trajectories(tmp_path / "articles.parquet") == load_trajectories(world / "articles.parquet")
    tokenizer, shop = load_tokenizer(str(world / "tokenizer")), load_catalogue(world / "catalogue.jsonl")
    articles = load_trajectories(world / "articles.parquet")
    assert len(articles) == 6 and {len(article.response_ids) for article in articles} == {384}
    written = " ".join(tokenizer.decode(article.response_ids) for article in articles)
    assert "search[" in written
    titles = {product.title for product in shop.products}
    other = generate_catalogue(SIZES["size"], 1, **BuildShop(**SIZES).options)  # the seed after the shop's
    assert any(product.title in written for product in other.products)
    assert not titles & {product.title for product in other.products}


def test_a_visit_in_the_texts_says_what_pages_look_like_and_seldom_how_to_buy_rightly():
    shop, rng, right = generate_catalogue(60, asin_digits=4, capitals=False), random.Random(0), 0
    for goal in make_goals(shop)[:100]:
        text = visited(shop, goal, rng, 3)
        first, search, results, click, item, *rest = text.splitlines()
        assert first == pages.search_page(goal.instruction).text and search.startswith("<action>search[")
        assert goal.title in results and results.startswith("Back to Search [SEP] Page 1 (Total results: 3)")
        assert click.removeprefix("<action>click[").removesuffix("]</action>").upper() in results
        assert item.startswith("Back to Search [SEP] < Prev") and rest[-1].startswith("<action>click[")
        wanted = [f"<action>click[{value}]</action>" for _, value in goal.options]
        right += goal.title in item and rest[::2] == [*wanted, "<action>click[buy now]</action>"]
    assert 2 <= right <= 30
    assert label(shop, random.Random(1)) != label(shop, random.Random(2))


def test_what_the_expert_reads_on_a_page_is_what_can_be_clicked():
    shop = generate_catalogue(40, asin_digits=4, capitals=False)
    for goal in make_goals(shop)[:40]:
        product = shop.by_asin[goal.asin]
        for page in (
            pages.search_page(goal.instruction),
            pages.results_page(goal.instruction, shop.products[:3], 1, 3),
            pages.results_page(goal.instruction, (), 2, 3),
            pages.item_page(goal.instruction, product),
            pages.sub_page(goal.instruction, product, pages.FEATURES),
        ):
            facts = page_facts(page.texts, goal)
            possible = [action for action in page.info["admissible"] if action.startswith("click[")]
            assert facts["page"] == page.name and sorted(facts["admissible"]) == sorted(possible)


def test_the_careful_expert_buys_what_is_wanted_and_the_careless_one_often_does_not(world):
    tasks = load_tasks(world / "demonstrations.parquet", answers=False)
    careful, protocol = visits(world, 0.0, tasks)
    assert sum(map(is_right, careful)) >= 57, "of 60"
    assert all(len(t.turns) in (4, 5) for t in careful if is_right(t)), "a search, a product, its options, the purchase"
    assert max(len(t.prompt_ids) + len(t.response_ids) for t in careful) <= 700
    careless, _ = visits(world, 0.5, tasks)
    assert 15 <= sum(map(is_right, careless)) <= 45
    assert all(turn.action.well_formed for t in careless for turn in t.turns)
    shown = protocol.decode((*careful[0].prompt_ids, *careful[0].response_ids))
    assert shown.count(goal_of(tasks[0]).instruction) == 1, "in the first page alone"


def test_skills_stand_in_the_demonstrations_prompts(world):
    tasks = load_tasks(world / "demonstrations.parquet", answers=False)[:6]
    skills = Skills("shopping_tiny", TaskType(), max_tokens=80, form="sentences", header="")
    told, protocol = visits(world, 0.0, tasks, skills=skills)
    plain, _ = visits(world, 0.0, tasks)
    for a, b in zip(told, plain, strict=True):
        assert a.response_ids == b.response_ids, "the expert needs no advice"
        assert protocol.decode(a.prompt_ids).startswith(f"<|im_start|>user\n{a.task.skills}\n\nWebShop [SEP] ")
        assert 20 < len(a.prompt_ids) - len(b.prompt_ids) <= 80
