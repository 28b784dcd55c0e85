"""The tiny household experiments turn by turn: like those of one conversation in all but the prompts, and these hold
what a model needs to act."""

from __future__ import annotations

import re
from typing import Any

import pytest

from data_modules.datasets.questions import load_tasks
from data_modules.demonstrations.turn_by_turn import TurnByTurn
from experiments.stages.graph import Graph, closure
from experiments.worlds.household.build import BuildHousehold
from experiments.worlds.household.environment import Household
from experiments.worlds.household.expert import HouseholdExpertEngine
from rollout.engines.base import SamplingParams
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.injection import Skills
from rollout.skills.retrieval import TaskType
from rollout.storage import load_trajectories, save_trajectories
from rollout.system import RolloutSystem

Arguments = dict[str, Any]
NAME = re.compile(r"[a-z]+ \d+")


def parts(graph: Graph, name: str) -> tuple[Arguments, Arguments, Arguments, Arguments]:
    """Arguments of the model, the data, the rollouts and their protocol, each without those that follow it."""
    config = graph.stage(name).config
    data = dict(config["data"]["init_args"])
    rollouts = dict(data.pop("rollouts")["init_args"])
    protocol = rollouts.pop("protocol")["init_args"]
    return config["model"]["init_args"], data, rollouts, protocol


def differing(one: Arguments, other: Arguments) -> set[str]:
    return {k for k in one.keys() | other.keys() if one.get(k) != other.get(k)}


@pytest.mark.parametrize(
    ("conversation", "turns", "learner", "data"),
    [
        ("sft_household_tiny", "sft_household_turns_tiny", set(), {"trajectories", "batch_tokens"}),
        ("grpo_household_tiny", "grpo_household_turns_tiny", {"policy", "reference"}, set()),
        ("sdar_tiny", "sdar_turns_tiny", {"policy", "reference"}, set()),
    ],
)
def test_only_what_is_read_differs_from_one_conversation(shipped, conversation, turns, learner, data):
    ours, theirs = parts(shipped, turns), parts(shipped, conversation)
    assert (
        shipped.stage(turns).config["model"]["class_path"] == shipped.stage(conversation).config["model"]["class_path"]
    )
    assert differing(ours[0], theirs[0]) == learner
    assert differing(ours[1], theirs[1]) == data
    assert differing(ours[2], theirs[2]) == {"engine", "max_response_tokens"}
    assert ours[2]["max_response_tokens"] == ours[2]["max_turns"] * ours[2]["max_turn_tokens"], "sampled ones alone"
    assert (ours[3]["window"], theirs[3]["window"]) == (2, None)
    assert differing(ours[3], theirs[3]) == {"window", "texts"}


def test_the_cold_start_is_that_of_the_conversations_after_the_prompts_of_rl(shipped):
    made = shipped.stage("turns_household_tiny").config["task"]["init_args"]
    assert made["trajectories"] == parts(shipped, "sft_household_tiny")[1]["trajectories"]
    for name in ("sft_household_turns_tiny", "grpo_household_turns_tiny", "sdar_turns_tiny"):
        assert "turns_household_tiny" in {stage.name for stage in closure([shipped.stage(name)])}
        assert parts(shipped, name)[3] == made["protocol"]["init_args"], "a prompt is the same in all of them"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    BuildHousehold(train=6, val=6, test=6, demonstrations=24, articles=4).run(folder)
    return folder


def demonstrations(world, skilled: bool):
    """Of the expert: with skills and care, or without both."""
    tokenizer, files = str(world / "tokenizer"), [str(world / "demonstrations.parquet")]
    engine = HouseholdExpertEngine(tokenizer, files, 0.0 if skilled else 0.3)
    protocol = EpisodeProtocol(tokenizer, texts="bare", window=None, require_thinking=False)
    skills = Skills("household_tiny", TaskType(), form="sentences", header="") if skilled else None
    rollouts = RolloutSystem(engine, protocol, Household(), max_turns=24, final_turn=False, skills=skills)
    try:
        return rollouts.rollout(load_tasks(files[0], answers=False), sampling=SamplingParams(max_new_tokens=50), seed=0)
    finally:
        rollouts.close()


@pytest.mark.parametrize("skilled", [False, True])
def test_a_prompt_holds_skills_task_last_steps_and_what_can_be_named(shipped, world, tmp_path, skilled):
    arguments = shipped.stage("turns_household_tiny").config["task"]["init_args"]["protocol"]["init_args"]
    protocol = EpisodeProtocol(**{**arguments, "tokenizer": str(world / "tokenizer")})
    save_trajectories(tmp_path / "talks.parquet", demonstrations(world, skilled))
    TurnByTurn([str(tmp_path / "talks.parquet")], protocol).run(tmp_path)
    room = parts(shipped, "sdar_turns_tiny")[2]
    limit = room["engine"]["init_args"]["max_length"] - room["max_turn_tokens"]
    for t in load_trajectories(tmp_path / "trajectories" / "part-00000.parquet"):
        assert bool(t.task.skills) == skilled
        acted = [turn.action.calls[0].arguments["action"] for turn in t.turns]
        seen = [t.task.question.strip(), *(call.result.text.strip() for call in t.calls)]
        for k, turn in enumerate(t.turns):
            text = protocol.decode(turn.prompt_ids)
            assert len(turn.prompt_ids) <= limit, "no history gives way"
            assert text.startswith(f"<|im_start|>user\n{t.task.skills}" if skilled else "<|im_start|>user\n")
            assert "our task is to: " in text and f"{seen[k]}\nactions: " in text
            steps = [f"{seen[i]}\n> {acted[i]}\n" for i in range(max(k - 2, 0), k)]
            assert "".join(steps) in text and text.count("\n> ") == len(steps)
            assert all(name in text for name in NAME.findall(acted[k])), f"{acted[k]} names what is not shown"
