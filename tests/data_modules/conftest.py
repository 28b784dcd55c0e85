"""A real rollout system over a scripted engine: everything but the language model is what training uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_modules.datasets.questions import write_tasks
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError
from tests.data_modules.toys import make_task
from tests.rollout.scripted import ToyRetriever
from tests.rollout.scripted_engine import ScriptedEngine

QUESTION = re.compile(r"Question (\d+) (\w+)")


@pytest.fixture(scope="session")
def protocol(model_dir) -> SearchR1Protocol:
    return SearchR1Protocol(str(model_dir), template="short")


@pytest.fixture
def make_system(protocol):
    """``make_system(latency=0.0, **options) -> RolloutSystem``; ``system.engine.requests`` tells what was asked."""
    made = []

    def asked(ids: tuple[int, ...]) -> tuple[int, str]:
        number, kind = QUESTION.search(protocol.decode(list(ids))).groups()
        return int(number), kind

    def script(ids: tuple[int, ...], sampling: SamplingParams):
        number, kind = asked(ids)
        if kind == "broken":
            return InfrastructureError("the retriever at http://nowhere does not answer")
        right = kind == "right" or (kind == "mixed" and sampling.seed % 2 == 0)
        return f"<answer> answer {number} </answer>" if right else "<answer> no idea </answer>"

    def make(latency: float = 0.0, **options) -> RolloutSystem:
        engine = ScriptedEngine(script, protocol.tokenizer, latency)
        engine.asked = asked
        environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
        made.append(RolloutSystem(engine, protocol, environment, ExactMatchReward(), **options))
        return made[-1]

    yield make
    for system in made:
        system.close()


@pytest.fixture
def question_file(tmp_path):
    """``question_file(name, kinds) -> path`` of a file with one question per kind."""

    def make(name: str, kinds: list[str], source: str = "made_up") -> str:
        path: Path = tmp_path / f"{name}.parquet"
        write_tasks(path, [make_task(i, kind, source) for i, kind in enumerate(kinds)])
        return str(path)

    return make
