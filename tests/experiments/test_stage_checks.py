"""A stage checks itself before it loads anything, with the checks of a chain."""

import json
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import dict_to_namespace

from experiments.registry.errors import ExperimentError
from experiments.stages import stage as stages
from experiments.stages.rollout_tools import check_rollouts
from experiments.stages.store import StageFolder

TOYS = "tests.experiments.toy_modules"


def prepared(workshop, *overrides):
    workshop.write(
        "walk",
        "experiment: {kind: fit, summary: a walk}\n"
        "trainer: {accelerator: cpu, max_epochs: 1}\n"
        f"model: {{class_path: {TOYS}.Walk}}\n"
        f"data: {{class_path: {TOYS}.Noise, init_args: {{batches: 10}}}}\n",
    )
    stage = workshop.graph("walk", *overrides).target()
    metadata = {"key": stage.key, "arguments": list(stage.arguments), "upstream": {}, "command": ""}
    StageFolder(stage.folder).prepare(stage, metadata, keep=False)
    return stage


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--trainer.gradient_clip_val=1"], "trainer.gradient_clip_val is 1, which does nothing here"),
        (
            ["--trainer.val_check_interval=0.5", "--trainer.check_val_every_n_epoch=null"],
            "should be an integer or a time",
        ),
        (["--trainer.callbacks+=lightning.pytorch.callbacks.Timer", "--trainer.callbacks.interval=epochh"], "epochh"),
    ],
)
def test_a_single_stage_is_refused_by_the_checks_of_a_chain(workshop, overrides, message, monkeypatch, capfd):
    monkeypatch.setattr(stages, "run_lightning", lambda *_: pytest.fail("the stage has begun"))
    monkeypatch.delenv(stages.PARENT_VARIABLE, raising=False)
    assert stages.run(prepared(workshop, *overrides).folder) == stages.REFUSED
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: experiment 'walk': ") and message in said


def test_a_stage_knows_the_folders_that_it_reads(workshop):
    workshop.task("a")
    workshop.task("b", "source: '${stage:a}'")
    stage = workshop.graph("b").target()
    store = StageFolder(stage.folder)
    upstream = {other.name: other.key for other in stage.upstream}
    store.prepare(stage, {"key": stage.key, "arguments": ["--task.text=x"], "upstream": upstream}, keep=False)
    found = stages.prepared(store, yaml.safe_load(store.config_path.read_text()))
    assert (found.name, found.kind, found.key, found.folder) == (stage.name, stage.kind, stage.key, stage.folder)
    assert [other.folder for other in found.upstream] == [other.folder for other in stage.upstream]
    assert found.arguments == ("--task.text=x",) and json.dumps(found.config) == json.dumps(stage.config)


@pytest.mark.parametrize("option", [{"window": 2}, {"history": "template"}])
def test_a_sampler_that_forks_is_refused_where_every_turn_has_its_own_prompt(option):
    rollouts = {
        "protocol": {"class_path": "rollout.protocols.hermes.HermesProtocol", "init_args": option},
        "environment": {"class_path": "rollout.environments.question_answering.QuestionAnswering", "init_args": {}},
        "sampler": {"class_path": "rollout.samplers.branching.BranchingSampler"},
    }
    config = dict_to_namespace({"data": {"init_args": {"rollouts": {"init_args": rollouts}}}})
    with pytest.raises(
        ExperimentError, match="forks trajectories .* HermesProtocol writes a new prompt for every turn"
    ):
        check_rollouts(SimpleNamespace(config=config), "x")


def prepared_task(workshop, arguments):
    workshop.task("a", arguments)
    stage = workshop.graph("a").target()
    StageFolder(stage.folder).prepare(stage, {"key": stage.key, "arguments": [], "upstream": {}}, keep=False)
    return str(stage.folder)


def test_a_stage_runs_in_the_foreground(workshop, monkeypatch):
    monkeypatch.delenv(stages.PARENT_VARIABLE, raising=False)
    folder = prepared_task(workshop, "text: words")
    done = workshop.run("stage", folder)
    assert (done.returncode, done.stdout) == (0, "writing words\n"), done
    assert not StageFolder(workshop.graph("a").target().folder).result(), "the runner alone says that a stage is done"
    failed = workshop.run("stage", prepared_task(workshop, "fault: value"))
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: the corpus is empty\n"), failed
    unprepared = workshop.run("stage", str(workshop.folder))
    assert unprepared.returncode == 2 and "no prepared stage in" in unprepared.stderr
