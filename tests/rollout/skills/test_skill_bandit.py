"""UCB over the categories of a bank."""

import json
import math

import pytest

from rollout.skills.bandit import UCB
from rollout.skills.bank import Selection, SkillBank
from tests.rollout.skills.skill_examples import bank_json, task

BANK = SkillBank.from_json(bank_json())


def ucb(**options):
    retriever = UCB(**options)
    retriever.bind(BANK)
    return retriever


def of(*names):
    return Selection(BANK.general, tuple((name, BANK.by_category[name]) for name in names))


def test_scores_by_hand():
    retriever = ucb(c=2.0)
    retriever.update([(of("heat"), 0.5), (of("clean"), 1.0), *[(of("clean"), 0.0)] * 3])
    # N = 5, ln 5 = 1.6094379; clean: 0.25 + 2 sqrt(1.6094379 / 4) = 1.5186362; heat: 0.5 + 2 sqrt(1.6094379)
    assert retriever.scores() == pytest.approx({"clean": 1.5186362, "heat": 3.0372724, "compare": math.inf}, abs=1e-6)
    assert retriever.select(task(), "").categories == ("compare",)
    retriever.update([(of("compare"), 0.0)])
    # N = 6, ln 6 = 1.7917595; 0.25 + sqrt(1.7917595) = 1.5885661; 0.5 + 2 sqrt(..) = 3.1771322; 2 sqrt(..) = 2.6771322
    assert retriever.scores() == pytest.approx({"clean": 1.5885661, "heat": 3.1771322, "compare": 2.6771322}, abs=1e-6)
    assert retriever.select(task(), "") == of("heat")


def test_untried_arms_first_and_all_of_them():
    retriever = ucb()
    chosen = {retriever.select(task(id=f"t{number}"), "").categories for number in range(30)}
    assert chosen == {("clean",), ("heat",), ("compare",)}
    retriever.update([(of("clean"), 100.0), (of("compare"), 100.0)])
    assert {retriever.select(task(id=f"t{number}"), "").categories for number in range(30)} == {("heat",)}


def test_ties_are_drawn_by_seed_and_task():
    ids = [f"t{number}" for number in range(40)]
    runs = [[ucb(seed=seed).select(task(id=id), "").categories for id in ids] for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_selecting_changes_nothing_before_the_update():
    retriever = ucb()
    retriever.update([(of(name), reward) for name, reward in (("clean", 1.0), ("heat", 0.0), ("compare", 0.0))])
    assert len({retriever.select(task(id=str(number)), "").categories for number in range(20)}) == 1
    assert retriever.state_dict() == {"arms": {"clean": [1, 1.0], "compare": [1, 0.0], "heat": [1, 0.0]}}


def test_a_selection_of_several_categories_counts_for_each():
    retriever = ucb()
    retriever.update([(of("clean", "heat"), 1.0)])
    assert retriever.state_dict() == {"arms": {"clean": [1, 1.0], "heat": [1, 1.0]}}


def test_state_goes_on_where_it_was():
    retriever = ucb(seed=5)
    retriever.update([(of("clean"), 0.25), (of("heat"), 0.75), (of("heat"), 0.1)])
    resumed = ucb(seed=5)
    resumed.load_state_dict(json.loads(json.dumps(retriever.state_dict())))
    assert resumed.scores() == retriever.scores() and resumed.state_dict() == retriever.state_dict()
    ids = [f"t{number}" for number in range(20)]
    assert [resumed.select(task(id=id), "") for id in ids] == [retriever.select(task(id=id), "") for id in ids]


@pytest.mark.parametrize("state", [{}])
def test_the_state_of_another_is_refused(state):
    with pytest.raises(ValueError, match="the state is not of a UCB over this bank"):
        ucb().load_state_dict(state)


def test_what_cannot_be_learnt_from():
    retriever = ucb()
    for pair, message in (
        ((of("heat"), math.nan), "a reward is nan"),
        ((Selection(BANK.general), 1.0), r"categories \[\]; expected some of"),
        ((Selection((), (("cool", ()),)), 1.0), r"categories \['cool'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            retriever.update([(of("clean"), 1.0), pair])
    assert retriever.state_dict() == {"arms": {}}  # not half of an update
    with pytest.raises(ValueError, match="UCB chooses a category, and the skill bank has none"):
        UCB().bind(SkillBank(BANK.general, {}))
