"""How ``make ask`` puts a question where the data module words the prompts."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

from experiments.commands.ask import ask, asked_task, example_task, start
from experiments.registry.errors import ExperimentError
from experiments.registry.project import Project
from experiments.stages.context import RunContext
from retrieval.types import IndexFolderError, RetrieverStartError
from rollout.trajectory import InfrastructureError


def test_an_asked_question_is_put_as_the_experiment_puts_its_own(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"Problem": "How many walks?", "Answer": 204}) + "\n")
    arguments = {"test_files": [f"aime24:{path}"], "prompts": "tool_reasoning", "lcb_examples": 0}
    example = example_task({"data": {"init_args": arguments}})
    ((role, content),) = asked_task("What is 2 + 2", example).prompt
    assert role == "user" and "What is 2 + 2?" in content and "walks" not in content and "\\boxed{}" in content
    assert example_task({"data": {"init_args": {"test_files": [f"aime24:{path}"]}}}).prompt == ()


@pytest.mark.parametrize("temperature", [-1.0, 0.001])
def test_a_temperature_that_no_engine_takes_is_refused_before_a_model_loads(temperature):
    with pytest.raises(ExperimentError, match="^--temperature: sampling.temperature: Input should be "):
        ask(
            Namespace(question="?", temperature=temperature),
            RunContext(Project.from_environment(), "dgpo_tiny", (), None),
        )


def test_the_first_question_is_read_as_the_experiment_reads_its_files(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "", "gold": "b"}) + "\n" + json.dumps({"prompt": "Why?", "gold": "b"}) + "\n")
    arguments = {"test_files": str(path), "columns": {"question": "prompt", "golden_answers": "gold"}}
    with pytest.raises(ExperimentError, match=f"^questions: .*{path.name}"):
        example_task({"data": {"init_args": arguments}})
    assert example_task({"data": {"init_args": arguments | {"on_invalid_row": "drop"}}}).question == "Why?"


@pytest.mark.parametrize(
    "error",
    [
        InfrastructureError("the search server\ndoes not answer"),
        RetrieverStartError("the search server does not answer"),
        IndexFolderError("the search server does not answer"),
        OSError("the search server does not answer"),
    ],
)
def test_what_does_not_start_is_one_line(error):
    def fail():
        raise error

    with pytest.raises(ExperimentError, match="the search server does not answer"):
        start(SimpleNamespace(start=fail))
