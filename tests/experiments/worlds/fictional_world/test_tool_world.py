"""The world with numbers: facts, problems and their splits, and the expert driven by the ordinary agent loop."""

import random
import re

import pytest

from data_modules.datasets.questions import load_tasks
from experiments.worlds.fictional_world.problems import FAMILIES, draw_problems
from experiments.worlds.fictional_world.schema import QUANTITIES
from experiments.worlds.fictional_world.tool_expert import ToolExpertEngine, ToolExpertPolicy
from experiments.worlds.fictional_world.tool_world import BuildToolWorld
from experiments.worlds.fictional_world.world import build_number_world
from retrieval.types import Document
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.rewards.qa import ExactMatchReward
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import CallOutcome, StopReason, Task, ToolResult

SIZES = {"entities": 150, "train": 30, "val": 4, "test": 6, "test_unseen": 4, "demonstrations": 60, "articles": 3}


class ExactPassages:
    """Finds the passages whose title and text hold every word of the query."""

    def __init__(self, passages):
        self.passages = [(p, set(re.findall(r"\w+", f"{p.title} {p.text}".lower()))) for p in passages]

    async def search(self, queries, k):
        wanted = [set(re.findall(r"\w+", q.lower())) for q in queries]
        found = [[p for p, words in self.passages if query <= words][:k] for query in wanted]
        return [[Document(p.id, p.title, p.text, 1.0) for p in hits] for hits in found]

    async def close(self):
        return None


class Calculator:
    """Stands for the Python tool in a test of the expert: programs of the expert only, never a model's."""

    name = "python"

    async def call(self, arguments):
        program = re.fullmatch(r"(print\(|x = )(.*?)\)?", arguments["code"])
        if program[1] == "x = ":
            return ToolResult("Nothing was printed.", CallOutcome.EMPTY)
        return ToolResult(str(eval(arguments["code"].removeprefix("print"))), CallOutcome.OK)

    async def close(self):
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tool_world")
    BuildToolWorld(**SIZES).run(path)
    return path


@pytest.fixture(scope="module")
def world():
    return build_number_world(SIZES["entities"], 0)


def test_every_fact_has_one_passage_that_tells_it(world):
    assert len(world.passages) == 7 * len(world.entities)
    for (entity_id, keyword), place in world.passage_of.items():
        entity = world.entities[entity_id]
        assert world.passages[place].text == f"The {keyword} of {entity.mention} is {world.told(entity, keyword)}."
    assert all(11 <= number <= 99 for number in world.numbers.values())


def test_no_wording_names_the_keyword_that_has_to_be_searched():
    for quantity in QUANTITIES:
        for phrase in quantity.phrases:
            assert quantity.keyword not in phrase and "{x}" in phrase


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_follow_from_the_facts_by_the_formula(world, family):
    for problem in draw_problems(world, list(world.entities), 20, {family: 1.0}, random.Random(1), set()):
        assert all(world.told(fact.entity, fact.keyword) == fact.told for fact in problem.facts)
        if problem.code:
            assert problem.answers == (str(eval(problem.code)),)
            told = re.findall(r"\d+", problem.code)
            assert all(fact.told in told for fact in problem.facts if fact.told.isdigit())
        else:
            assert problem.answers == (problem.facts[-1].told,)
        assert len(problem.facts) == {"one": 1, "two": 2, "hop": 2, "lookup": 1, "compute": 0}[family]


def test_splits_are_disjoint_and_the_unseen_test_is_about_strangers(folder):
    splits = {name: load_tasks(folder / f"{name}.parquet") for name in ("demonstrations", "train", "val", "test")}
    questions = [task.question for tasks in splits.values() for task in tasks]
    assert len(questions) == len(set(questions)) == 60 + 30 + 4 + 6 + 4
    seen = {step[0] for name in ("demonstrations", "train") for t in splits[name] for step in t.metadata["steps"]}
    strangers = [task for task in splits["test"] if task.metadata["split"] == "test_unseen"]
    assert len(strangers) == 4
    # a stranger is never looked up in training; what lies behind its hop may be
    assert not {t.metadata["steps"][0][0] for t in strangers if t.metadata["steps"]} & seen


def test_the_world_is_the_same_every_time(folder, tmp_path):
    BuildToolWorld(**SIZES).run(tmp_path)
    for name in ("corpus.jsonl", "train.parquet", "articles.parquet", "tokenizer/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
    BuildToolWorld(**SIZES, seed=1).run(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() != (folder / "corpus.jsonl").read_bytes()


@pytest.mark.parametrize(("error_rate", "max_turns"), [(0.0, 3), (0.9, 8)])
def test_the_expert_solves_everything(folder, world, error_rate, max_turns):
    tokenizer, files = str(folder / "tokenizer"), [str(folder / "demonstrations.parquet")]
    tools = {"search": SearchTool(ExactPassages(world.passages), topk=2), "python": Calculator()}
    system = RolloutSystem(
        engine=ToolExpertEngine(tokenizer, files, error_rate=error_rate),
        protocol=ARPOProtocol(tokenizer, system="none"),
        environment=QuestionAnswering(tools),
        reward=ExactMatchReward(),
        max_turns=max_turns,
    )
    try:
        done = system.rollout(load_tasks(files), sampling=SamplingParams(max_new_tokens=200), seed=0)
    finally:
        system.close()
    assert all(t.stop_reason is StopReason.ANSWER and t.reward.total == 1.0 for t in done)
    outcomes = [call.result.outcome for t in done for call in t.calls]
    assert (CallOutcome.EMPTY in outcomes) == (error_rate > 0)
    if error_rate == 0:  # no call too many
        assert all(len(t.calls) == len(t.task.metadata["steps"]) + bool(t.task.metadata["code"]) for t in done)


def test_a_careless_program_is_repeated_with_a_print():
    task = Task("1", "?", ("6",), "s", metadata={"steps": [], "code": "2 * 3"})
    policy = ToolExpertPolicy(error_rate=0.99)
    first = policy.next_turn(task, "")
    assert first.endswith("<python> x = 2 * 3 </python>")
    shown = " <result>\nNothing was printed.\n</result>"
    second = policy.next_turn(task, first + shown)
    assert second.endswith("<python> print(2 * 3) </python>")
    last = policy.next_turn(task, first + shown + second + " <result>\n6\n</result>")
    assert last.endswith(r"<answer> \boxed{6} </answer>")
