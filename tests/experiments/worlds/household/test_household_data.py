"""Games as question files, an expert as an engine, texts to learn from: all through the real loop."""

from __future__ import annotations

import dataclasses
import random

import pytest

from data_modules.datasets.questions import load_tasks
from data_modules.demonstrations.generate_trajectories import is_right
from experiments.worlds.household.build import BuildHousehold, numbered_name, transcript
from experiments.worlds.household.environment import Household
from experiments.worlds.household.expert import HouseholdExpertEngine
from experiments.worlds.household.games import TASK_TYPES
from experiments.worlds.household.generate import generate_game
from experiments.worlds.language import repeated_list
from rollout.engines.base import SamplingParams
from rollout.protocols.episodes import EpisodeProtocol
from rollout.skills.injection import Skills
from rollout.skills.retrieval import TaskType
from rollout.storage import load_trajectories
from rollout.system import RolloutSystem
from rollout.tokenizer import load_tokenizer

SIZES = {"train": 12, "val": 6, "test": 6, "demonstrations": 30, "articles": 20}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("household")
    BuildHousehold(**SIZES).run(folder)
    return folder


def system(world, error_rate, skills=None, max_turns=30):
    protocol = EpisodeProtocol(str(world / "tokenizer"), texts="bare", window=None, require_thinking=False)
    engine = HouseholdExpertEngine(str(world / "tokenizer"), [str(world / "demonstrations.parquet")], error_rate)
    return RolloutSystem(engine, protocol, Household(), max_turns=max_turns, final_turn=False, skills=skills)


def test_splits_are_games_of_all_types_and_share_none(world):
    seen = set()
    for name in ("train", "val", "test", "demonstrations"):
        tasks = load_tasks(world / f"{name}.parquet", answers=False)
        assert len(tasks) == SIZES[name] and {t.data_source for t in tasks} == set(TASK_TYPES)
        Household().check(tasks)
        games = {repr(t.metadata["household"]) for t in tasks}
        assert len(games) == len(tasks) and not games & seen
        seen |= games


@pytest.mark.slow
def test_same_seed_same_bytes(world, tmp_path):
    BuildHousehold(**SIZES).run(tmp_path)
    BuildHousehold(**SIZES, seed=1).run(tmp_path / "other")
    for name in ("train.parquet", "tokenizer/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (world / name).read_bytes()
    assert load_trajectories(tmp_path / "articles.parquet") == load_trajectories(world / "articles.parquet")
    assert load_tasks(tmp_path / "other" / "val.parquet", answers=False) != load_tasks(
        world / "val.parquet", answers=False
    )


def test_words_of_the_games_are_single_tokens(world):
    tokenizer = load_tokenizer(str(world / "tokenizer"))
    for text in (" countertop", " microwave", " 2", " arrive", "action"):
        assert len(tokenizer(text, add_special_tokens=False).input_ids) == 1, text


@pytest.mark.parametrize("error_rate", [0.0, 0.3])
def test_the_expert_wins_and_carelessness_costs_steps(world, error_rate):
    tasks = load_tasks(world / "demonstrations.parquet", answers=False)
    rollouts = system(world, error_rate)
    try:
        found = rollouts.rollout(tasks, sampling=SamplingParams(max_new_tokens=50), seed=0)
    finally:
        rollouts.close()
    assert sum(map(is_right, found)) >= 27, "of 30, in 30 turns"
    steps = sum(t.reward.parts["steps"] for t in found) / len(found)
    assert steps < 10 if error_rate == 0 else steps > 11
    for t in found:
        assert t.turns[0].action.well_formed and t.reward.total in (0.0, 10.0)


def test_skills_stand_in_the_demonstrations_prompts(world):
    skills = Skills("household_tiny", TaskType(), form="sentences", header="")
    rollouts = system(world, 0.0, skills)
    tasks = load_tasks(world / "demonstrations.parquet", answers=False)[:6]
    try:
        told = rollouts.rollout(tasks, sampling=SamplingParams(max_new_tokens=50), seed=0)
        plain = rollouts.rollout(tasks, sampling=SamplingParams(max_new_tokens=50), seed=0, inject_skills=False)
    finally:
        rollouts.close()
    for a, b in zip(told, plain, strict=True):
        assert a.task.skills and not b.task.skills
        assert a.response_ids == b.response_ids, "the expert needs no advice"
        text = rollouts.protocol.decode(a.prompt_ids)
        assert text.startswith(f"<|im_start|>user\n{a.task.skills}\n\n-= Welcome")


def test_of_games_that_open_alike_the_expert_plays_the_one_it_sees(world):
    rollouts = system(world, 0.3)
    tasks = load_tasks(world / "demonstrations.parquet", answers=False)
    alike = [dataclasses.replace(t, question=tasks[0].question) for t in tasks]
    engine = rollouts.engine
    try:
        found = rollouts.rollout(tasks[:6], sampling=SamplingParams(max_new_tokens=50), seed=0)
    finally:
        rollouts.close()
    for t, task in zip(found, tasks, strict=False):
        transcript = rollouts.protocol.decode(t.response_ids).rpartition("<action>")[0]  # up to what was seen last
        assert engine._policy.fits(task, transcript)
        assert not all(engine._policy.fits(other, transcript) for other in alike)


def test_texts(world):
    rng = random.Random(0)
    first, second = repeated_list(rng, numbered_name).splitlines()
    assert first.removeprefix("List: ") == second.removeprefix("Again: ")
    text = transcript(generate_game("pick_heat_then_place_in_recep", 1, size="small"), rng)
    assert text.startswith("-= Welcome") and text.count("\n> ") >= 3
