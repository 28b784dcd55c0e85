"""The invented world keeps its promises: deterministic, ambiguous names, disjoint splits, nothing to know by heart."""

import random
from collections import Counter

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.fictional_world import schema
from experiments.worlds.fictional_world.build import LANGUAGE_SEED_OFFSET, BuildWorld
from experiments.worlds.fictional_world.questions import as_task, draw_questions, phrase
from experiments.worlds.fictional_world.world import build_world
from rollout.rewards.scoring import exact_match
from rollout.storage import load_trajectories

SPLITS = ("demonstrations", "train", "val", "test")


def small_world(seed=0, **changes):
    sizes = {"entities": 2000, "train": 300, "val": 20, "test": 40, "test_unseen": 30, "demonstrations": 200,
             "articles": 20, "article_tokens": 120}  # fmt: skip
    return BuildWorld(seed=seed, **(sizes | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    small_world().run(path)
    return path


def all_tasks(folder):
    return {name: load_tasks(folder / f"{name}.parquet") for name in SPLITS}


def test_same_seed_same_bytes_other_seed_other_world(folder, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    for path, seed in ((again, 0), (other, 1)):
        path.mkdir()
        small_world(seed).run(path)
    for name in ("corpus.jsonl", "tokenizer/tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert all_tasks(again) == all_tasks(folder)
    assert load_trajectories(again / "articles.parquet") == load_trajectories(folder / "articles.parquet")
    assert (other / "corpus.jsonl").read_bytes() != (folder / "corpus.jsonl").read_bytes()


def test_the_shipped_size_has_at_least_20000_passages_and_namesakes():
    world = build_world(4200, 0)
    assert len(world.passages) == 21_000
    assert [p.id for p in world.passages] == [str(i) for i in range(21_000)]
    names = Counter(e.name for e in world.entities)
    assert sum(n for n in names.values() if n > 1) > 300  # namesakes, which only a profession or a kind tells apart
    assert len({(e.kind, e.mention) for e in world.entities}) == len(world.entities)


def test_splits_are_disjoint_and_unseen_entities_stay_unseen(folder):
    tasks = all_tasks(folder)
    chains = [(t.metadata["subject"], tuple(t.metadata["relations"])) for split in tasks.values() for t in split]
    assert len(set(chains)) == len(chains)
    assert len({t.question for split in tasks.values() for t in split}) == len(chains)
    strangers = {t.metadata["subject"] for t in tasks["test"] if t.metadata["split"] == "test_unseen"}
    assert len(strangers) > 10
    mention = {e.id: e.mention for e in build_world(2000, 0).entities}
    for name in ("demonstrations", "train", "val"):
        for t in tasks[name]:
            assert t.metadata["subject"] not in strangers
            assert not {mention[s] for s in strangers} & set(t.metadata["mentions"][1:]) or _shared(
                t, mention, strangers
            )


def _shared(task, mention, strangers):
    """A non-person's mention may belong to two entities of different kinds; then one of them is no stranger."""
    clash = {mention[s] for s in strangers} & set(task.metadata["mentions"][1:])
    return all(sum(m == c for m in mention.values()) > 1 for c in clash)


def test_gold_passages_tell_the_chain_and_questions_hide_the_keywords(folder):
    for task in all_tasks(folder)["train"]:
        mentions, relations = task.metadata["mentions"], task.metadata["relations"]
        assert len(task.gold_passages) == task.metadata["hops"] == len(relations)
        for hop, (_, text) in enumerate(task.gold_passages):
            assert text == f"The {relations[hop]} of {mentions[hop]} is {mentions[hop + 1]}."
        assert exact_match(mentions[-1], task.golden_answers)
        assert mentions[-1] not in task.question
        assert not any(f" {keyword} " in f" {task.question.rstrip('?.')} " for keyword in relations)


def test_phrases_name_one_relation_each():
    phrases = [p for r in schema.RELATIONS for p in r.phrases]
    assert len(set(phrases)) == len(phrases)
    assert all(p.count("{x}") == 1 for p in phrases)
    assert len({r.keyword for r in schema.RELATIONS}) == len(schema.RELATIONS) == 25


def test_no_answer_can_be_guessed():
    """Always giving the commonest answer is right in well under 1 % of the questions."""
    world = build_world(4200, 0)
    rng = random.Random(1)
    chains = draw_questions(world, list(world.entities), 2000, (0.4, 0.4, 0.2), rng, set())
    tasks = [as_task(world, c, phrase(c, rng), str(i), "x") for i, c in enumerate(chains)]
    commonest = Counter(t.golden_answers[0] for t in tasks).most_common(1)[0][0]
    assert sum(exact_match(commonest, t.golden_answers) for t in tasks) / len(tasks) < 0.01


def test_articles_tell_of_another_world(folder):
    facts = {p.text for p in build_world(4200, 0).passages}
    told = [p.text for p in build_world(4200, LANGUAGE_SEED_OFFSET).passages]
    assert sum(t in facts for t in told) / len(told) < 0.001
    for article in load_trajectories(folder / "articles.parquet"):
        assert len(article.response_ids) == 120 == sum(article.loss_mask)


def test_the_tokenizer_holds_names_whole(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    words = [*(word for pool in schema.WORDS.values() for word in pool), *(r.keyword for r in schema.RELATIONS)]
    split = [w for w in words if len(tokenizer(" " + w, add_special_tokens=False).input_ids) > 1]
    assert not split


def test_a_kind_of_question_that_runs_out_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected 0.50, 0.50, 0.00: 100 entities do not have enough"):
        small_world(entities=100, train=700, demonstrations=100, hop_shares=(0.5, 0.5, 0.0)).run(tmp_path)
