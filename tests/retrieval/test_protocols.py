"""Classes of one's own behind the Protocols, through the parser of the command line: annotations do not count."""

import sys

import pytest

from experiments.registry.errors import ExperimentError
from experiments.stages.parser import cli

PLAIN = """
from typing import Any
from rollout.samplers.base import run_independent
from rollout.trajectory import CallOutcome, Reward, ToolResult

class MyTool:
    name = "search"
    async def call(self, arguments: dict) -> ToolResult: return ToolResult("42", CallOutcome.OK)
    async def close(self): pass

class MyReward:
    scale = 1
    def score(self, trajectory, weight: float = 1.0) -> "Reward": return Reward(weight, {})

class MyAsyncReward:
    async def score_async(self, trajectory) -> Reward: return Reward(1.0, {})
    async def close(self) -> None: pass

class MySampler:
    async def sample(self, group: Any, n: int) -> list: return await run_independent(group, range(n))

class MyRetriever:
    async def search(self, queries, k=3) -> list[list[Any]]: return [[] for _ in queries]
    async def close(self): pass

class MyEngine:
    async def start(self): pass
    async def generate(self, token_ids, sampling): raise NotImplementedError
    async def load_files(self, files, version: "int", between_steps=False, **more): pass
    async def close(self): pass

class MyWorld:
    def __call__(self, task, *, tools_enabled=True): raise NotImplementedError
    async def close(self): pass

class MyProtocol:
    tokenizer, stop, stop_token_ids, eos_ends = None, (), (), True
    tools = ("search",)
    def prompt_ids(self, task, mode=None): return []
    def decode(self, token_ids): return ""
    def parse(self, text, mode=None): raise NotImplementedError
    @staticmethod
    def observation_ids(action, results, budget): return [], False

class Run:
    def __init__(self, rollouts: "RolloutSystem") -> None: self.rollouts = rollouts
    def run(self, output_dir): return {}

class RunTool:
    def __init__(self, tools: "dict[str, Tool] | None" = None) -> None: self.tools = tools
    def run(self, output_dir): return {}

from rollout.system import RolloutSystem
from rollout.tools.base import Tool
"""
OWN = {
    name: f"my_parts.My{kind}" for name, kind in [("engine", "Engine"), ("protocol", "Protocol"), ("reward", "Reward")]
}
SEARCH = {"class_path": "rollout.tools.search.SearchTool", "init_args": {"retriever": "my_parts.MyRetriever"}}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Make a source text importable as ``my_parts``."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(source: str) -> None:
        (tmp_path / "my_parts.py").write_text(source)
        sys.modules.pop("my_parts", None)

    yield written
    sys.modules.pop("my_parts", None)


def built(task: str, **arguments):
    block = {"class_path": f"my_parts.{task}", "init_args": arguments}
    config = {"experiment": {"kind": "task"}, "task": block}
    return cli(config, (), "experiment 'mine'", instantiate=True).task


@pytest.mark.parametrize("first_line", ["", "from __future__ import annotations\n"])
def test_every_part_of_a_rollout_can_be_ones_own(write, first_line):
    write(first_line + PLAIN)
    world = {
        "class_path": "rollout.environments.question_answering.QuestionAnswering",
        "init_args": {"tools": {"search": "my_parts.MyTool", "other": SEARCH}},
    }
    system = built("Run", rollouts=OWN | {"environment": world, "sampler": "my_parts.MySampler"}).rollouts
    assert type(system.sampler).__name__ == "MySampler" and type(system.reward).__name__ == "MyReward"
    assert {name: type(tool.tool).__name__ for name, tool in system.environment.tools.items()} == {
        "search": "MyTool",
        "other": "SearchTool",
    }
    other = built(
        "Run", rollouts=OWN | {"environment": "my_parts.MyWorld", "reward": "my_parts.MyAsyncReward"}
    ).rollouts
    assert type(other.reward).__name__ == "MyAsyncReward" and type(other.environment).__name__ == "MyWorld"


def test_a_method_without_an_annotation_may_return_something_to_be_awaited(write):
    """A wrapper of another tool: ``call`` returns what the other's coroutine function does."""
    own = "async def call(self, arguments: dict) -> ToolResult: return ToolResult("
    assert own in PLAIN
    write(PLAIN.replace(own, "def call(self, arguments): return self.inner.call("))
    assert type(built("RunTool", tools={"search": "my_parts.MyTool"}).tools["search"]).__name__ == "MyTool"


@pytest.mark.parametrize(
    ("right", "wrong", "difference"),
    [
        ("arguments: dict)", "query: str)", r"call\(query\) does not take the calls of Tool.call\(arguments\): .*arg"),
        ("arguments: dict)", ")", r"call\(\) does not take the calls of Tool.call\(arguments\): too many positional"),
        ("async def call(", "def call(", "call must be 'async def'"),
        ("async def close(self): pass", "closing = None", "it has no method close$"),
    ],
)
@pytest.mark.parametrize("first_line", ["", "from __future__ import annotations\n"])
def test_a_tool_that_does_not_fit_is_refused_with_the_difference(write, right, wrong, difference, first_line):
    assert right in PLAIN
    write(first_line + PLAIN.replace(right, wrong, 1))
    with pytest.raises(
        ExperimentError, match=r"^experiment 'mine': .*my_parts\.MyTool does not fit Tool: " + difference
    ) as error:
        built("RunTool", tools={"search": "my_parts.MyTool"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("right", "wrong", "difference"),
    [
        (
            "score(self, trajectory, weight",
            "score(self, answer, weight",
            r"MyReward does not fit RewardFunction: score\(answer, ",
        ),
        (
            "def score(",
            "def points(",
            r"MyReward does not fit RewardFunction: it has no method score; .*fit AsyncReward: .* s",
        ),
        ("def score(", "async def score(", "MyReward does not fit RewardFunction: score must not be 'async def'"),
        (
            "parse(self, text, mode=None)",
            "parse(self, text)",
            r"MyProtocol does not fit ChatProtocol: parse\(text\) does not",
        ),
        (
            "*, tools_enabled=True",
            "*, enabled=True",
            r"MyWorld does not fit EnvironmentFactory: __call__\(task, \*, enabled=True",
        ),
    ],
)
def test_other_parts_that_do_not_fit(write, right, wrong, difference):
    assert right in PLAIN
    write("from __future__ import annotations\n" + PLAIN.replace(right, wrong, 1))
    with pytest.raises(ExperimentError, match=difference):
        built("Run", rollouts=OWN | {"environment": "my_parts.MyWorld", "sampler": "my_parts.MySampler"})
