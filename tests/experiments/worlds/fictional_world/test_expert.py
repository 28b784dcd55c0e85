"""The expert, driven by the ordinary agent loop over a small retriever written here."""

import asyncio
import re

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.fictional_world.build import BuildWorld
from experiments.worlds.fictional_world.expert import ExpertEngine
from experiments.worlds.fictional_world.world import build_world
from retrieval.types import Document
from rollout.engines.base import SamplingParams
from rollout.engines.weights.files import WeightFiles
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool

SAMPLING = SamplingParams(max_new_tokens=96)


class WordOverlap:
    """Ranks passages by how many of the query's words their text and their title hold: right for a good query."""

    def __init__(self, passages):
        self.passages = [(p, self._words(p.text), self._words(p.title)) for p in passages]

    @staticmethod
    def _words(text):
        return set(re.findall(r"\w+", text.lower()))

    async def search(self, queries, k):
        return [self._best(self._words(q), k) for q in queries]

    def _best(self, words, k):
        scored = [(len(words & text) + len(words & title), p) for p, text, title in self.passages]
        ranked = sorted(scored, key=lambda pair: -pair[0])[:k]
        return [Document(p.id, p.title, p.text, float(score)) for score, p in ranked]

    async def close(self):
        return None


@pytest.fixture(scope="module")
def world_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    BuildWorld(entities=200, train=40, val=4, test=4, test_unseen=2, demonstrations=60, articles=2).run(path)
    return path


def rollouts(folder, error_rate):
    tokenizer = str(folder / "tokenizer")
    return RolloutSystem(
        engine=ExpertEngine(tokenizer, [str(folder / "demonstrations.parquet")], error_rate=error_rate),
        protocol=SearchR1Protocol(tokenizer, template="short"),
        environment=QuestionAnswering({"search": SearchTool(WordOverlap(build_world(200, 0).passages))}),
        reward=ExactMatchReward(),
        max_turns=8,
    )


def roll(folder, error_rate, mode=PromptMode.AGENT):
    tasks = load_tasks(folder / "demonstrations.parquet")
    system = rollouts(folder, error_rate)
    try:
        return system.rollout(tasks, n=1, sampling=SAMPLING, seed=0, mode=mode)
    finally:
        system.close()


def test_a_careful_expert_needs_one_search_per_hop_and_is_right(world_folder):
    for trajectory in roll(world_folder, error_rate=0.0):
        assert trajectory.reward.total == 1.0, trajectory.task.question
        assert len(trajectory.executed_calls) == trajectory.task.metadata["hops"]


def test_a_careless_expert_notices_and_recovers(world_folder):
    careless = roll(world_folder, error_rate=0.6)
    extra = [len(t.executed_calls) - t.task.metadata["hops"] for t in careless]
    assert sum(t.reward.total for t in careless) / len(careless) > 0.95
    assert sum(e > 0 for e in extra) > 10  # careless queries did fail, and were followed by better ones
    recovered = next(t for t, e in zip(careless, extra, strict=True) if e > 0)
    assert recovered.calls[0].request.arguments != recovered.calls[1].request.arguments


@pytest.mark.parametrize("mode", [PromptMode.GOLD_DIRECT, PromptMode.GOLD_THINK])
def test_given_the_passages_the_expert_answers_at_once(world_folder, mode):
    for trajectory in roll(world_folder, 0.15, mode):
        assert trajectory.reward.total == 1.0 and not trajectory.calls and len(trajectory.turns) == 1


def test_an_unknown_question_is_refused(world_folder):
    engine = ExpertEngine(str(world_folder / "tokenizer"), [str(world_folder / "demonstrations.parquet")])
    asyncio.run(engine.start())
    ids = engine._tokenizer("<|im_start|>user\nQuestion: Who?<|im_end|>\n").input_ids
    with pytest.raises(ValueError, match="knows only the questions"):
        asyncio.run(engine.generate(ids, SAMPLING))
    with pytest.raises(ValueError, match="no weights"):
        asyncio.run(engine.load_files(WeightFiles(()), 1))
