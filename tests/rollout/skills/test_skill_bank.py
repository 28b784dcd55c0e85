"""Skill banks: SkillRL's JSON and SDAR's Markdown, read and checked."""

import json

import pytest

from rollout.skills.bank import Skill, SkillBank, SkillBankError
from rollout.skills.reading import read_bank
from tests.rollout.skills.skill_examples import bank_json


def test_json_to_bank(tmp_path):
    bank = SkillBank.from_json(bank_json())
    assert bank.general[1] == Skill("gen_002", "Take", "Take it.", "when it is seen")
    assert [skill.id for skill in bank.by_category["clean"]] == ["cle_001", "cle_002"]
    (tmp_path / "bank.json").write_text(json.dumps(bank_json()))
    assert read_bank(tmp_path / "bank.json") == bank
    bare = bank_json()
    del bare["metadata"]
    assert SkillBank.from_json(bare).metadata == {}


def test_mapping_and_keywords():
    bank = SkillBank.from_json(bank_json())
    assert (bank.category_of("pick_heat"), bank.category_of("clean"), bank.category_of("nq")) == ("heat", "clean", None)
    # by task type or by category, in lower case; a category without keywords is left out
    assert bank.keywords == {"clean": ("wash", "clean"), "heat": ("hot",)}


def spoil(*path, value=None, delete=False):
    values = bank_json()
    here = values
    for key in path[:-1]:
        here = here[key]
    if delete:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return values


SPOILT = {
    r"general_skills: Field required": spoil("general_skills", delete=True),
    r"skills: Unexpected keyword argument": spoil("skills", value=[]),
    r"general_skills: Input should be a valid tuple; found \{\}": spoil("general_skills", value={}),
    r"task_specific_skills: Input should be a valid dictionary; found \[\]": spoil("task_specific_skills", value=[]),
    r"metadata: Input should be a valid dictionary; found 'x'": spoil("metadata", value="x"),
    r"general_skills\[1\].principle: Field required": spoil("general_skills", 1, "principle", delete=True),
    r"heat\[0\].extra: Unexpected keyword argument": spoil("task_specific_skills", "heat", 0, "extra", value=1),
    r"clean\[1\].title: expected a text that is not empty; found ' '": spoil(
        "task_specific_skills", "clean", 1, "title", value=" "
    ),
    r"general_skills\[0\].principle: Input should be a valid string; found 3": spoil(
        "general_skills", 0, "principle", value=3
    ),
    r"clean\[0\]: the id 'gen_001' is taken by general_skills\[0\]": spoil(
        "task_specific_skills", "clean", 0, "skill_id", value="gen_001"
    ),
    r"task_specific_skills.heat: Tuple should have at least 1 item": spoil("task_specific_skills", "heat", value=[]),
    r"task_specific_skills.a/b.*: a category's name: expected letters, .* found 'a/b'": spoil(
        "task_specific_skills", "a/b", value=[]
    ),
    r"task_specific_skills.general_skills.*: a category's name: expected": spoil(
        "task_specific_skills", "general_skills", value=[]
    ),
    r"task_to_skill.pick_heat: no category 'hot'; there are \['clean', 'compare', 'heat'\]": spoil(
        "metadata", "task_to_skill", "pick_heat", value="hot"
    ),
    r"metadata.task_to_skill: Input should be a valid dictionary; found \[\]": spoil(
        "metadata", "task_to_skill", value=[]
    ),
    r"task_keywords.cool: neither a category nor a task type": spoil("metadata", "task_keywords", "cool", value=[]),
    r"task_to_skill.pick_heat: Input should be a valid string; found \['heat'\]": spoil(
        "metadata", "task_to_skill", "pick_heat", value=["heat"]
    ),
    r"metadata.task_to_skill. .*: expected a text that is not empty; found ' '": spoil(
        "metadata", "task_to_skill", " ", value="heat"
    ),
    r"task_keywords.heat: Input should be a valid list; found 'hot'": spoil(
        "metadata", "task_keywords", "heat", value="hot"
    ),
    r"task_keywords.heat\[1\]: expected a text that is not empty; found ' '": spoil(
        "metadata", "task_keywords", "heat", value=["hot", " "]
    ),
    r"general_skills\[0\].title: expected a text": spoil("general_skills", 0, "title", value="half \ud800 a pair"),
    r"Input should be a dictionary or an instance of SkillBank": [],
}


@pytest.mark.parametrize("message", SPOILT)
def test_errors_name_file_and_place(message, tmp_path):
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(SPOILT[message]))
    with pytest.raises(SkillBankError, match=rf"^skill bank {path}: .*{message}"):
        read_bank(path)


def test_a_bank_that_is_not_there():
    known = r"'huosehold'.*one of \['atlas', 'household', 'household_tiny', 'recipes_tiny', 'search', 'shop"
    with pytest.raises(SkillBankError, match=known):
        read_bank("huosehold")


GENERAL_MD = """### ANY HEADING ###

In 2 words: be useful.

1. Look: Look around. Apply this before every move.

2. Take: Never say Apply this aloud; take it: now. Apply this when it is seen.
"""
CLEAN_MD = """### TASK: clean ###
1. Sink: Go to the sink. Apply this with dirt.
2. Rinse: Rinse. Apply this at the sink
"""


@pytest.fixture
def folder(tmp_path):
    mapping = {
        "skill_files": {"general_skills": "general.md", "clean": "clean.md", "cleverness": "clever.md"},
        "task_to_skill": {"pick_clean": "clean"},
        "task_keywords": {"pick_clean": ["wash"]},
    }
    (tmp_path / "skill_mapping.json").write_text(json.dumps(mapping))
    (tmp_path / "general.md").write_text(GENERAL_MD)
    (tmp_path / "clean.md").write_text(CLEAN_MD)
    (tmp_path / "clever.md").write_text("1. Think: Think twice. Apply this always.")
    return tmp_path


def test_markdown_as_sdar_injects_it(folder):
    bank = read_bank(folder)
    assert bank.general == (
        Skill("gen_001", "Look", "Look around.", "before every move"),
        Skill("gen_002", "Take", "Never say Apply this aloud; take it: now.", "when it is seen"),
    )
    assert bank.by_category == {  # two categories begin with "cle": their ids are told apart
        "clean": (
            Skill("clean_001", "Sink", "Go to the sink.", "with dirt"),
            Skill("clean_002", "Rinse", "Rinse.", "at the sink"),
        ),
        "cleverness": (Skill("cleverness_001", "Think", "Think twice.", "always"),),
    }
    assert bank.metadata == {"task_to_skill": {"pick_clean": "clean"}, "task_keywords": {"pick_clean": ["wash"]}}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("clean.md", CLEAN_MD + "\nAnd more.\n", r"clean.md, line 5: expected '1. Title.*found 'And more.'"),
        ("clean.md", "### TASK ###\n", "clean.md: no skills"),
        ("clean.md", None, "clean.md: missing, but skill_mapping.json names it"),
        ("skill_mapping.json", "{}", "skill_mapping.json: skill_files: Field required"),
        ("skill_mapping.json", '{"skill_files": {}, "task_to_skill": {}}', "missing 'general_skills'"),
        ("skill_mapping.json", "[", "skill_mapping.json: not JSON"),
    ],
)
def test_markdown_errors_name_file_and_line(file, content, message, folder):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(SkillBankError, match=f"{folder}/.*{message}"):
        read_bank(folder)
