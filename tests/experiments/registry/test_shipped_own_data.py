"""The family for your own data: paths reach every stage, and nothing else is asked for."""

import json
import re

import pytest

from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check
from tests.rollout.chat_models import chat_model, template

CHAINS = {
    "my_grpo": ["my_index"],
    "my_sft": ["my_index", "my_demonstrations"],
    "my_dgpo": ["my_index", "my_demonstrations", "my_kd"],
}


@pytest.fixture
def plan(tmp_path):
    """``plan(name, *words)``: the stages with these paths; the last one is validated, and all of them for my_dgpo."""
    (tmp_path / "q.csv").write_text("prompt,golden_answers\nq,a\n")
    (tmp_path / "c.jsonl").write_text('{"text": "t"}\n')
    for folder in ("model", "teacher"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    paths = ["--paths.model", f"{tmp_path}/model", "--paths.questions", f"{tmp_path}/q.csv"]

    def make(name, *words, valid=True):
        graph = Graph(Project(outputs=tmp_path / "out"), name, parse([*paths, *words]))
        stages = graph.plan(compare=False)
        for stage in stages if name == "my_dgpo" else stages[-1:] if valid else []:
            check(stage, ROOT)
        return stages

    return make


@pytest.mark.parametrize("name", CHAINS)
def test_paths_are_all_that_a_chain_needs(plan, name, tmp_path):
    words = ["--paths.corpus", f"{tmp_path}/c.jsonl", "--paths.columns.question", "prompt"]
    stages = plan(name, *words, "--paths.teacher", f"{tmp_path}/teacher")
    assert [stage.name for stage in stages] == [*CHAINS[name], name]
    assert all(need.present for stage in stages for need in stage.needs)
    text = json.dumps([stage.config for stage in stages])
    assert "Qwen/" not in text and "corpus.jsonl" not in text and "questions.jsonl" not in text
    read = [(s.config.get("data") or s.config["task"])["init_args"] for s in stages if s.name != "my_index"]
    assert all(data["columns"] == {"question": "prompt"} and data["splits"] for data in read)


@pytest.mark.parametrize(("tools", "turns", "shown"), [("python", 5, ["code_interpreter"]), ("none", 1, [])])
def test_without_a_corpus_nothing_is_indexed(plan, tools, turns, shown):
    [stage] = plan("my_grpo", "--paths.tools", tools)
    rollouts = stage.config["data"]["init_args"]["rollouts"]["init_args"]
    assert rollouts["max_turns"] == turns and rollouts["protocol"]["init_args"]["tools"] == shown
    assert "RetrieverProcess" not in json.dumps(stage.config)


def test_where_tools_are_shown_is_said_once_for_a_chain(plan, tmp_path):
    words = ["--paths.corpus", f"{tmp_path}/c.jsonl", "--paths.tools_in", "system"]
    stages = plan("my_grpo", *words, valid=False) + plan("my_sft", *words, valid=False)
    stages += plan("my_sft", *words, "--paths.learn", "conversations", valid=False)
    found = re.findall(r'"tools_in": "(\w+)"', json.dumps([stage.config for stage in stages]))
    assert len(found) >= len(stages) - 3 and set(found) == {"system"}


def test_a_chat_template_whose_calls_are_not_read_is_refused(plan, tmp_path):
    """Before a model loads; a folder without a tokenizer is the run's business."""
    chat_model(tmp_path / "model", "qwen3", template("qwen3").replace("<tool_call>", "<call>"))
    with pytest.raises(ExperimentError, match=r"my_grpo.*/model' writes tool calls that are not read back; tried herm"):
        plan("my_grpo", "--paths.tools", "python")
    plan("my_grpo", "--paths.tools", "python", "--paths.tools_in", "system")


def test_a_generation_config_that_transformers_does_not_load_is_refused(plan, tmp_path):
    (tmp_path / "model" / "generation_config.json").write_text('{"num_return_sequences": 4}')
    with pytest.raises(ExperimentError, match=r"init_args.policy: \S+generation_config.json: transformers refuses it"):
        plan("my_grpo", "--paths.tools", "none")


def test_missing_questions_are_told_with_what_to_say(tmp_path):
    stage = Graph(Project(outputs=tmp_path), "my_grpo", parse(["--paths.tools", "none"])).target()
    [need] = [need for need in stage.needs if not need.present]
    assert need.path == "questions.jsonl" and "--paths.questions FILE" in need.how
