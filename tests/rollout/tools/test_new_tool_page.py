"""The page that shows how to write a tool is executed: its class, both YAMLs by a dry run, its command line."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.arpo_tags import ARPOProtocol
from rollout.protocols.hermes import HermesProtocol
from rollout.trajectory import ActionKind, CallOutcome, Task
from tests.rollout.chat_models import chat_model

PAGE = (ROOT / "docs" / "new_tool.md").read_text()
TASK = Task("q", "What is 2 * (3 + 4)?", ("14",), "toy")


def blocks(language: str) -> list[tuple[str, str]]:
    """(name of the file in its first line, text) of each block."""
    texts = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [(re.match(r"# (\S+)", text)[1] if text.startswith("#") else "", text) for text in texts]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    """The files of the page, at their places beside the repository's."""
    for name, text in [*blocks("python"), *blocks("yaml")]:
        assert not (ROOT / name).exists()
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Project(experiment_dirs=(tmp_path, ROOT / "experiments/configs"), outputs=tmp_path)
    for name in ("my_tools.calculator", "my_tools"):
        sys.modules.pop(name, None)


def environment(options: dict) -> QuestionAnswering:
    """The calculator alone of a resolved environment."""
    mine = {"tools", "tool_limits"} & set(options)
    alone = {key: {name: value for name, value in options[key].items() if name == "calculator"} for key in mine}
    options = options | alone
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(QuestionAnswering, "environment")
    return parser.instantiate_classes(parser.parse_object({"environment": options})).environment


@pytest.mark.parametrize(
    ("name", "turn", "text"),
    [
        ("calculator_my", '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}', "14"),
        ("calculator_smoke", "<think> I compute. </think> <calculator> 1 / 3 </calculator>", "0.333333"),
    ],
)
def test_both_experiments_are_valid_and_the_model_calls_the_tool(project, tmp_path, name, turn, text):
    shortened = shlex.split(re.search(r'ARGS="(.*)"', PAGE)[1])
    stage = Graph(project, name, parse(shortened), None).target()
    check(stage, ROOT)
    rollouts = stage.config["data"]["init_args"]["rollouts"]["init_args"]
    options = dict(rollouts["protocol"]["init_args"])
    if name == "calculator_my":
        protocol = HermesProtocol(
            **(options | {"tokenizer": chat_model(tmp_path / "model", "qwen3"), "tools_in": "template"})
        )
        turn += f"\n</tool_call>{protocol.chat.end}"
        assert "such as 2 * (3 + 4)" in protocol.decode(protocol.prompt_ids(TASK)).lower()
    else:
        protocol = ARPOProtocol(**(options | {"tokenizer": chat_model(tmp_path / "model", "qwen3")}))
        assert "</calculator>" in protocol.stop
    action = protocol.parse(turn)
    assert action.kind is ActionKind.CALL

    async def step():
        made = environment(rollouts["environment"]["init_args"])
        await made.start()
        done = await made(TASK).step(action)
        await made.close()
        return done.results[0]

    result = asyncio.run(step())
    assert (result.text, result.outcome) == (text, CallOutcome.OK)
    ids, _ = protocol.observation_ids(action, [result], 50)
    assert text in protocol.decode(ids)


def test_what_the_model_does_wrong_is_a_result(project):
    from my_tools.calculator import Calculator

    for arguments in ({}, {"expression": "2 +"}, {"expression": "__import__('os')"}, {"expression": "1 / 0"},
                      {"expression": "-" * 5000 + "1"}, {"expression": None}):  # fmt: skip
        assert asyncio.run(Calculator().call(arguments)).outcome is CallOutcome.ERROR


def test_the_commands(project, tmp_path):
    """The first one runs; the others are targets of the Makefile, on the page's experiments."""
    first, *others = blocks("bash")[0][1].strip().splitlines()
    code = shlex.split(first)[2]
    folders = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=folders)
    assert run.stdout == "14\n", run.stderr
    named = {Path(name).stem for name, _ in blocks("yaml")}
    for line in others:
        make, target, experiment, *_ = shlex.split(line)
        assert make == "make" and re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert experiment.removeprefix("EXP=") in named
    assert all(set(yaml.safe_load(text)) <= {"inherits", "experiment", "model", "values"} for _, text in blocks("yaml"))
