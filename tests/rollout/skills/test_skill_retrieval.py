"""Which skills a task gets, without learning and without an encoder."""

import collections

import pytest

from rollout.skills.bandit import UCB
from rollout.skills.bank import SkillBank
from rollout.skills.reading import read_bank
from rollout.skills.retrieval import Full, Keyword, Random, Shuffled, TaskType
from tests.rollout.skills.skill_examples import bank_json, task

BANK = SkillBank.from_json(bank_json())


def bound(retriever, bank=BANK):
    retriever.bind(bank)
    return retriever


def categories(retriever, the_task, text="", bank=BANK):
    selection = bound(retriever, bank).select(the_task, text)
    assert selection.general == bank.general
    assert selection.by_category == tuple((name, bank.by_category[name]) for name in selection.categories)
    return selection.categories


def test_full():
    assert categories(Full(), task()) == ("clean", "heat", "compare")
    ids = [skill.id for skill in Full.select(bound(Full()), task(), "").skills]
    assert ids == ["gen_001", "gen_002", "cle_001", "cle_002", "hea_001", "com_001"]


def test_task_type():
    assert categories(TaskType(), task(data_source="pick_heat"), "clean it") == ("heat",)
    assert categories(TaskType(), task(data_source="clean")) == ("clean",)  # a category is its own type
    with pytest.raises(ValueError, match=r"task t1: .*'pick_cool'; it knows \['clean', 'compare', 'heat', 'hotpotqa'"):
        categories(TaskType(), task(data_source="pick_cool"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Put a CLEAN cup away.", ("clean",)),
        ("Take the hot cup, wash it.", ("clean", "heat")),
        ("An unwashed shot", ("clean", "heat")),
    ],
)
def test_keywords(text, expected):
    assert categories(Keyword(), task(), text) == expected


def test_keywords_on_the_sentences_of_alfworld():
    """Source of the sentences: alfworld.gen.goal_library (templates of each task type)."""
    bank = read_bank("household")
    sentences = {
        "put some mug on desk": {"pick_and_place"},
        "find two mug and put them in cabinet": {"pick_and_place", "examine"},
        "examine the book with the desklamp": {"look_at_obj_in_light", "examine"},
        "look at book under the desklamp": {"look_at_obj_in_light"},
        "put a clean mug in shelf": {"pick_and_place", "clean"},
        "heat some egg and put it in garbagecan": {"heat", "pick_and_place"},
        "put a hot egg in garbagecan": {"heat", "pick_and_place"},
        "cool some apple and put it in microwave": {"cool", "pick_and_place"},
    }
    room = "You are in the middle of a room. Looking quickly around you, you see a fridge 1, a microwave 1.\n\n"
    for sentence, expected in sentences.items():
        assert set(categories(Keyword(), task(), room + "Your task is to: " + sentence + ".", bank)) == expected


def test_the_path_of_the_game_comes_first():
    """Released rule 2: the first task type that is part of the path; general skills where none is."""
    path = Keyword(path=True, data_source=True)
    played = task(data_source="hotpotqa", household={"file": "train/pick_clean-Mug-2/trial/game.tw-pddl"})
    assert categories(path, played, "hot") == ("clean",)
    assert categories(path, task(household={"file": "train/slice-2/game.tw-pddl"}), "hot") == ()
    generated = task(data_source="slice", household={"game": {}})
    assert categories(path, generated, "hot") == ("heat",)  # no path: on to the keywords
    assert categories(Keyword(), played, "hot") == ("heat",)  # not asked for


def test_data_source():
    rule = Keyword(data_source=True)
    assert categories(rule, task(question="Who?", data_source="hotpotqa"), "wash") == ("heat",)
    assert categories(rule, task(question="Who?", data_source="musique"), "hot") == ("clean",)
    assert categories(rule, task(question="Who?", data_source="text"), "hot") == ("heat",)  # unknown: keywords


def test_the_released_search_skills_map_no_data_source():
    """Their rule stands in the released code; a set that neither knows is told before a model loads."""
    own = bank_json()
    names = ("direct_retrieval", "multi_hop_reasoning", "entity_attribute_lookup")
    skill = own["general_skills"][0]
    own |= {"metadata": {}, "task_specific_skills": {name: [{**skill, "skill_id": name}] for name in names}}
    bank, rule = SkillBank.from_json(own), Keyword(data_source=True)
    direct, hops, attribute = names
    expected = {"nq": direct, "triviaqa": direct, "musique": hops, "2wikimultihopqa": hops, "popqa": attribute}
    assert {source: categories(rule, task(data_source=source), "", bank) for source in expected} == {
        source: (name,) for source, name in expected.items()
    }
    with pytest.raises(ValueError, match="task t1: no skills for data source 'hle'; known are .*task_to_skill"):
        bound(rule, bank).check_task(task(data_source="hle"))


def test_random_draws_by_task_and_seed_and_nothing_else():
    ids = [f"t{number}" for number in range(600)]
    first = [categories(Random(seed=1), task(id=id)) for id in ids]
    one = bound(Random(seed=1))
    assert [one.select(task(id=id), "clean").categories for id in reversed(ids)] == first[::-1]
    counts = collections.Counter(first)
    assert counts.keys() == {("clean",), ("heat",), ("compare",)} and min(counts.values()) > 150  # 200 expected
    assert [categories(Random(seed=2), task(id=id)) for id in ids[:50]] != first[:50]
    assert first[:4] == [("clean",), ("compare",), ("heat",), ("clean",)]  # on every machine, in every run


def test_what_can_be_selected():
    assert [s.categories for s in bound(TaskType()).possible()] == [("clean",), ("heat",), ("compare",)]
    assert [s.categories for s in bound(Full()).possible()] == [("clean", "heat", "compare")]


def test_binding():
    without = SkillBank(BANK.general, {})
    with pytest.raises(RuntimeError, match=r"Full.bind\(bank\) comes before"):
        Full().select(task(), "")
    with pytest.raises(ValueError, match="no task_keywords"):
        bound(Keyword(), without)
    with pytest.raises(ValueError, match="Random chooses a category, and the skill bank has none"):
        bound(Random(), without)
    retriever = bound(Full())
    retriever.bind(SkillBank.from_json(bank_json()))  # the same again
    with pytest.raises(ValueError, match="already chooses from another bank"):
        retriever.bind(without)


def test_a_bank_with_keywords_knows_no_unknown_source_either():
    """Keywords may decide by the question; where none does, the general skills alone would be no one's choice."""
    rule, silent = bound(Keyword(data_source=True)), bound(Keyword(data_source=True, unknown_sources="general"))
    rule.check_task(task(question="What is hot?", data_source="text"))
    with pytest.raises(ValueError, match="no skills for data source 'text'"):
        rule.check_task(task(question="Who?", data_source="text"))
    silent.check_task(task(question="Who?", data_source="text"))
    assert categories(silent, task(question="Who?", data_source="text"), "who?") == ()
    asked = task(question="Which is older, Ena or Ilo?", data_source="unmapped")
    assert categories(Keyword(data_source=True, compare=False, unknown_sources="general"), asked, "which or") == ()


def test_shuffled_gives_other_categories_in_the_same_number():
    retriever = bound(Shuffled(TaskType(), seed=1))
    chosen = [retriever.select(task(id=f"t{i}", data_source="clean"), "") for i in range(60)]
    assert {s.categories for s in chosen} == {("heat",), ("compare",)}
    assert all(s.general == BANK.general for s in chosen)
    assert retriever.select(task(id="t0", data_source="clean"), "") == chosen[0]
    assert bound(Shuffled(Full())).select(task(), "").categories == (), "no others are left"
    with pytest.raises(ValueError, match="Shuffled replaces the choices of UCB"):
        Shuffled(UCB())
