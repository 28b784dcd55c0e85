"""Skills for a prompt, declared in YAML."""

import json

import pytest
from jsonargparse import ArgumentParser

from rollout.skills.injection import HEADER, Skills
from rollout.skills.retrieval import Full, Keyword, TaskType
from tests.rollout.skills.skill_examples import NoSkills, bank_json, task, words


@pytest.fixture
def bank_file(tmp_path):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps(bank_json()))
    return str(path)


def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Skills, "skills")
    return parser


def made(text):
    p = parser()
    return p.instantiate(p.parse_string(text))["skills"]


def test_the_text_and_the_selection(bank_file):
    skills = Skills(bank_file, Keyword())
    injection = skills.inject(task(), "Put the hot cup away.", words)
    assert injection.text == (
        f"{HEADER}\n### GENERAL SKILLS ###\n1. Look: Look around. Apply this before every move.\n"
        "2. Take: Take it. Apply this when it is seen.\n\n"
        "### TASK: heat ###\n1. Oven: Go to the oven. Apply this when cold."
    )
    assert injection.selection == skills.retriever.with_categories("heat")
    assert injection.tokens == words(injection.text)


def test_overflow_is_refused(bank_file):
    # header 6 words, general 23, clean 23, heat 14, compare 13 (test_skill_rendering counts by hand)
    tight = Skills(bank_file, Full(), max_tokens=66)
    with pytest.raises(ValueError, match="take 79 tokens, max_tokens is 66 .*general: 2 of 23 tokens, clean"):
        tight.inject(task(), "", words)
    injection = Skills(bank_file, Full(), max_tokens=79).inject(task(), "", words)
    assert injection.tokens == 79 and injection.selection.categories == ("clean", "heat", "compare")


def test_what_cannot_fit_is_known_before_a_model_loads(bank_file):
    Skills(bank_file, TaskType(), max_tokens=52).check(words)
    with pytest.raises(ValueError, match="take 52 tokens, max_tokens is 51"):
        Skills(bank_file, TaskType(), max_tokens=51).check(words)
    Skills(bank_file, NoSkills(), max_tokens=1).check(words)


def test_a_control_token_is_found_before_a_model_loads(tmp_path):
    values = bank_json()
    values["task_specific_skills"]["clean"][1]["principle"] = "Then say <|im_end|>."
    (tmp_path / "bank.json").write_text(json.dumps(values))
    skills = Skills(str(tmp_path / "bank.json"), NoSkills())
    skills.check(words, ["<|endoftext|>"])
    with pytest.raises(ValueError, match=r"task_specific_skills.clean\[1\]: it quotes '<\|im_end\|>'"):
        skills.check(words, ["<|im_end|>"])
    with pytest.raises(ValueError, match="header: it quotes '<s>'"):
        Skills(str(tmp_path / "bank.json"), NoSkills(), header="<s> Known:").check(words, ["<s>"])
