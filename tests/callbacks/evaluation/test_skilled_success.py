"""Success with skills, over real episodes of the workshop."""

import json
import re

import pytest

from callbacks.evaluation.evaluation import Evaluation
from callbacks.evaluation.skilled_success import SkilledSuccess
from data_modules.evaluation_data import EvaluationData
from experiments.worlds.recipes.build import BuildRecipes
from experiments.worlds.recipes.environment import Recipes
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.bandit import UCB
from rollout.skills.injection import Skills
from rollout.skills.retrieval import Keyword
from rollout.system import RolloutSystem
from tests.callbacks.helpers import Hands
from tests.rollout.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_that_reads_is_right_with_skills_alone(trainer_for, tmp_path, first):
    """The engine reads: it does what the prompt says, and uses the kiln where it says nothing."""
    BuildRecipes(train=1, val=1, test=16, demonstrations=50).run(tmp_path)
    protocol = EpisodeProtocol(str(tmp_path / "tokenizer"), "bare", None, require_thinking=False)

    def read(ids, sampling):
        text = protocol.tokenizer.decode(list(ids), skip_special_tokens=False)
        step = re.findall(r"step (\d)", text.rpartition("order")[2])[-1]
        told = re.search(rf"For .*step {step} (\w+)", text)
        return f"<action> step {step} {told[1] if told else 'kiln'} </action><|im_end|>"

    engine = ScriptedEngine(read, protocol.tokenizer)
    rollouts = RolloutSystem(engine, protocol, Recipes(), max_turns=6, final_turn=False)
    data = EvaluationData(rollouts, test_files=[str(tmp_path / "test.parquet")])
    skills = Skills("recipes_tiny", Keyword(), max_tokens=512, form="sentences", header="")
    callbacks = [Evaluation(200), SkilledSuccess(skills)]
    trainer_for([callbacks[first], callbacks[1 - first]]).test(Hands(), datamodule=data, verbose=False)
    found = json.loads((tmp_path / "stage" / "evaluation.json").read_text())["test"]
    assert found["acc"]["mean"] == 0.0
    assert (found["with_skills"]["mean"], found["with_skills"]["n"]) == (1.0, 16)


def test_skills_that_do_not_fit_are_refused_before_a_model_loads(tmp_path):
    BuildRecipes(train=1, val=1, test=1, demonstrations=50).run(tmp_path)
    protocol = EpisodeProtocol(str(tmp_path / "tokenizer"), "bare", None, require_thinking=False)
    rollouts = RolloutSystem(ScriptedEngine([]), protocol, Recipes(), max_turns=6, final_turn=False)
    data = EvaluationData(rollouts, test_files=[str(tmp_path / "test.parquet")])
    with pytest.raises(ValueError, match="max_tokens is 10"):
        SkilledSuccess(Skills("recipes_tiny", Keyword(), max_tokens=10)).accept_data(data)
    with pytest.raises(ValueError, match="UCB learns: take another"):
        SkilledSuccess(Skills("recipes_tiny", UCB(), max_tokens=512))
