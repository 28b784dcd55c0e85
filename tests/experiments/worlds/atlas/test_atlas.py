"""The atlas: its facts, corpus, splits, and an expert that answers with the real index."""

import json
import random

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.atlas.build import BuildAtlas
from experiments.worlds.atlas.expert import AtlasPolicy
from experiments.worlds.atlas.facts import folded, load_atlas
from experiments.worlds.atlas.questions import CURRENCY, draw_chain
from retrieval.index import BuildIndex
from retrieval.retriever import Retriever
from rollout.rewards.scoring import exact_match

SPLITS = ("demonstrations", "train", "val", "test")


@pytest.fixture(scope="module")
def atlas():
    return load_atlas(12)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("atlas")
    figures = BuildAtlas(demonstrations=60, train=300, val=60, test=60).run(folder)
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]
    return folder, figures, rows, {name: load_tasks(folder / f"{name}.parquet") for name in SPLITS}


def test_facts_are_those_of_geonames_and_names_mean_one_place(atlas):
    bulgaria = atlas.countries["BG"]
    assert (bulgaria.name, bulgaria.capital, bulgaria.currency, bulgaria.domain, bulgaria.calling_code) == (
        "Bulgaria", "Sofia", "Lev", ".bg", "359",
    )  # fmt: skip
    assert [atlas.countries[code].name for code in bulgaria.neighbours[:2]] == ["Turkey", "Romania"]
    assert atlas.capitals["BG"].time_zone == "Europe/Sofia"
    assert not {"AN", "CS"} & set(atlas.countries)
    names = [folded(place.name) for place in (*atlas.countries.values(), *atlas.cities)]
    names += [folded(city.alias) for city in atlas.cities if city.alias]
    assert len(set(names)) == len(names)
    cities = {folded(city.name) for city in atlas.cities}
    assert not cities & {folded(city.name) for city in atlas.namesakes}


def test_the_corpus_has_every_fact_once_and_no_id_twice(world):
    _, figures, rows, splits = world
    assert figures["passages"] == len(rows) == len({row["id"] for row in rows}) > 6000
    texts = [row["contents"] for row in rows]
    for tasks in splits.values():
        for task in tasks:
            assert len(task.gold_passages) == task.metadata["hops"] == len(task.metadata["facts"])
            for fact, (title, text) in zip(task.metadata["facts"], task.gold_passages, strict=True):
                assert fact in text and texts.count(f'"{title}"\n{text}') == 1
            assert task.golden_answers[0] in task.gold_passages[-1][1]
            assert not any(exact_match(name, task.golden_answers) for name in task.metadata["names"])


def test_no_training_question_passes_through_a_country_of_another_split(world, atlas):
    *_, splits = world
    questions = [task.question for tasks in splits.values() for task in tasks]
    assert len(set(questions)) == len(questions) == 480
    codes = BuildAtlas._divided(atlas, random.Random("atlas:0"))
    assert sorted(code for found in codes.values() for code in found) == sorted(atlas.countries)
    country_of = {city.name: city.country for city in atlas.cities} | {
        city.alias: city.country for city in atlas.cities if city.alias
    }
    country_of |= {country.name: code for code, country in atlas.countries.items()}

    def passed(task):
        return {country_of[name] for name in task.metadata["names"]}

    for task in splits["train"] + splits["demonstrations"]:
        assert passed(task) <= codes["train"]
    for task in splits["val"]:
        assert country_of[task.metadata["names"][0]] in codes["val"] and not passed(task) & codes["test"]
    for task in splits["test"]:
        assert country_of[task.metadata["names"][0]] in codes["test"]


def test_the_same_seed_gives_the_same_files_and_too_many_questions_are_refused(world, tmp_path):
    folder = world[0]
    BuildAtlas(demonstrations=60, train=300, val=60, test=60).run(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (folder / "corpus.jsonl").read_bytes()
    assert load_tasks(tmp_path / "train.parquet") == load_tasks(folder / "train.parquet")
    with pytest.raises(ValueError, match="ask for fewer"):
        BuildAtlas(hop_shares=(1, 0, 0), test=100_000).run(tmp_path)


def test_chains_end_with_an_answer_and_count_an_alias_as_a_hop(atlas):
    rng = random.Random(0)
    city = next(city for city in atlas.cities if city.alias)
    chains = [chain for _ in range(400) if (chain := draw_chain(atlas, city, 3, rng))]
    assert {chain.hops for chain in chains} == {3} and {chain.alias for chain in chains} == {True, False}
    country = atlas.countries[city.country].name
    for chain in chains:
        assert len(chain.relations) == 3 - chain.alias and chain.answer not in (city.name, country)
        if chain.relations[-1] is CURRENCY and len(chain.relations) == 2:
            assert chain.answer == atlas.countries[city.country].currency


def test_an_expert_that_searches_finds_every_answer_in_the_real_index(world, tmp_path):
    """The careful query finds its passage first; the name alone often does not, and the expert recovers."""
    folder, _, _, splits = world
    BuildIndex(str(folder / "corpus.jsonl")).run(tmp_path)
    retriever = Retriever(str(tmp_path / "index"))
    try:
        for error_rate in (0.0, 0.9):
            policy, searches, answered = AtlasPolicy(error_rate), 0, 0
            for task in splits["test"]:
                transcript = ""
                for _ in range(8):
                    turn = policy.next_turn(task, transcript)
                    if "<tool_call>" not in turn:
                        break
                    call = json.loads(turn.partition("<tool_call>")[2].partition("</tool_call>")[0])
                    searches += 1
                    (found,) = retriever.search([call["arguments"]["query"]], 1)
                    transcript += f"{turn}<tool_response>{found[0].text if found else ''}</tool_response>"
                answered += f"\\boxed{{{task.golden_answers[0]}}}" in turn
            assert answered >= 0.9 * len(splits["test"])
            needed = sum(task.metadata["hops"] for task in splits["test"])
            assert searches < 1.2 * needed if error_rate == 0 else searches > 1.2 * needed
    finally:
        retriever.close()
