"""A world of one's own: the page's module, class path, YAML and rollouts, with no file of the repository edited."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from data_modules.datasets.files import DatasetError
from data_modules.evaluation_data import EvaluationData
from experiments.registry.errors import ExperimentError
from experiments.registry.project import ROOT, Project
from experiments.stages.classes import plays_episodes
from experiments.stages.graph import Graph
from experiments.stages.validate import check, check_classes
from rollout.engines.base import SamplingParams
from rollout.protocols.episodes import EpisodeProtocol
from rollout.system import RolloutSystem
from rollout.trajectory import Reward, StopReason
from tests.rollout.scripted_engine import ScriptedEngine

PAGE = Path(__file__).parents[3] / "docs" / "new_environment.md"
SAMPLING = SamplingParams(max_new_tokens=40)


def blocks(language):
    """Name of the file in a block's first line, and the block."""
    found = re.findall(rf"```{language}\n(# (\S+)\n.*?)```", PAGE.read_text(), re.DOTALL)
    return {name: text for text, name in found}


@pytest.fixture(params=["", "from __future__ import annotations\n"], ids=["annotations", "postponed"])
def guess(request, tmp_path, monkeypatch):
    """The page's module, imported from a folder outside the repository."""
    (tmp_path / "guess.py").write_text(request.param + blocks("python")["guess.py"])
    for name, text in blocks("yaml").items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    import guess  # pyright: ignore[reportMissingImports]  # written above

    yield guess
    sys.modules.pop("guess", None)


@pytest.fixture
def built(guess, tmp_path):
    guess.BuildGuess(tasks=9).run(tmp_path / "world")
    return tmp_path / "world"


def play(guess, built, say, reward=None, protocol=None):
    """Episodes of the test split's first four numbers, as a data module rolls them out."""
    protocol = protocol or EpisodeProtocol(str(built / "tokenizer"), "bare", window=None, require_thinking=False)
    engine = ScriptedEngine(lambda ids, sampling: say(protocol.decode(ids)), protocol.tokenizer)
    limits = {"max_turns": 4, "final_turn": False, "max_turn_tokens": 40}
    system = RolloutSystem(engine, protocol, guess.GuessTheNumber(), reward, **limits)
    data = EvaluationData(rollouts=system, test_files=[str(built / "test.parquet")])
    data.setup("test")
    try:
        return system.rollout(data._tasks["test"][:4], sampling=SAMPLING, seed=0)
    finally:
        data.close()


def upwards(text):
    """1, 2, 3, ...: one more after each answer."""
    return f"<action>{1 + text.count('higher')}</action><|im_end|>"


def test_class_paths_and_yaml_of_the_page_are_accepted(guess, tmp_path):
    project = Project(experiment_dirs=(tmp_path, ROOT / "experiments" / "configs"), outputs=tmp_path / "outputs")
    graph = Graph(project, "grpo_guess")
    for name in ("world_guess", "init_guess", "grpo_guess"):
        check_classes(graph.stage(name).config, name)
    check(graph.stage("world_guess"), project.root)
    check(graph.target(), project.root)
    assert plays_episodes(graph.target().config), "make ask has no question for it"


TAGS = """
inherits: [grpo_guess]
data:
  init_args:
    rollouts:
      init_args:
        protocol:
          class_path: rollout.protocols.arpo_tags.ARPOProtocol
          init_args: {tokenizer: "${model.init_args.policy}", tools: {act: action, calculator: expression}}
"""


def test_a_dry_run_refuses_a_tool_that_the_world_has_not(guess, tmp_path):
    (tmp_path / "tags_guess.yaml").write_text(TAGS)
    project = Project(experiment_dirs=(tmp_path, ROOT / "experiments" / "configs"), outputs=tmp_path / "outputs")
    said = "tags_guess.*none named calculator; name it in the `tools` of the class GuessTheNumber and execute it in"
    with pytest.raises(ExperimentError, match=said):
        check(Graph(project, "tags_guess").target(), project.root)


def test_episodes_are_scored_by_the_world_and_by_a_reward_of_ones_own(guess, built):
    first, *_, fourth = play(guess, built, upwards)
    assert [t.stop_reason for t in (first, fourth)] == [StopReason.ENVIRONMENT_DONE] * 2
    assert (first.task.question, len(fourth.calls)) == ("guess a number", 4)
    assert [call.result.text for call in fourth.calls] == ["higher"] * 3 + ["right"]
    assert fourth.reward.total == 1.0 and fourth.reward.parts == {"environment": 1.0, "success": 1.0, "guesses": 4.0}
    rewarded = play(guess, built, upwards, guess.FewGuesses())
    assert [t.reward.total for t in rewarded] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert [t.reward.total for t in play(guess, built, lambda _: "9<|im_end|>", guess.FewGuesses())] == [0.1] * 4


def test_the_reward_takes_an_episode_that_ended_before_its_first_step(guess):
    assert guess.FewGuesses().score(SimpleNamespace(reward=Reward(0.0, {}))).total == 0.0


def test_a_world_that_does_not_say_that_it_scores_itself_needs_gold_answers(guess, built, monkeypatch):
    monkeypatch.delattr(guess.GuessTheNumber, "scores_itself")
    with pytest.raises(DatasetError, match="9 of 9 rows with no gold answer.*says scores_itself = True"):
        play(guess, built, upwards)


def test_a_protocol_that_calls_tools_the_world_has_not_is_refused(guess, built, protocol):
    with pytest.raises(ValueError, match="SearchR1Protocol calls the tools search, but the environment has none named"):
        play(guess, built, upwards, protocol=protocol)


def test_the_page_promises_commands_that_exist():
    commands = re.findall(r"^make (\S+) EXP=(\S+)", PAGE.read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target, _ in commands)
    assert {f"{name}.yaml" for _, name in commands} <= blocks("yaml").keys()
    assert all(yaml.safe_load(text)["experiment"] for text in blocks("yaml").values())
