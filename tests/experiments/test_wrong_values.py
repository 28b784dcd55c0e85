"""Wrong values in every kind of option end with one sentence of ours, never with the parser's list of attempts."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge
from lightning.pytorch import Trainer

from common.ranges import PositiveInt, TopK, UnitInterval
from experiments.registry.compose import check_experiment
from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import apply, parse
from experiments.registry.project import ROOT, Project
from experiments.stages import option_types, trainer_options
from experiments.stages.classes import import_class
from experiments.stages.graph import Graph, Stage, missing_files
from experiments.stages.requirements import check_packages
from experiments.stages.validate import check_arguments, check_classes, check_names, with_arguments
from lightning_modules.models.packing import check_available
from rollout.tools.limits import ToolLimits

JARGON = ("Union", "typing.", "NoneType", "subtypes", "pydantic", "<class", "Traceback")


@cache
def resolved(name="dgpo_tiny"):
    return Graph(Project(), name).target().config


def check_with(*overrides):
    """As the dry run, over the resolved configuration: 20 ms instead of half a second."""
    config, arguments = apply(resolved(), parse(overrides).own)
    check_experiment(config, "x")
    check_classes(with_arguments(config, arguments, "x"), "x")


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and not [word for word in JARGON if word in text], text
    return text


@pytest.mark.parametrize(
    ("hint", "good", "bad", "words"),
    [
        (bool, [True, "false"], [1, "maybe", None], "true or false"),
        (int, [3, "3"], [1.5, True, "a", [3]], "a whole number"),
        (PositiveInt | None, [1, None], [0, "x", {}], "a whole number of at least 1 or null"),
        (UnitInterval, [0, 1.0, "1e-3"], [2, float("nan"), "inf"], "a number of at least 0 and at most 1"),
        (Literal[-1] | PositiveInt, [-1, 7], [0, -2], "-1 or a whole number of at least 1"),
        (Annotated[int, Ge(2)], [2], [1], "a whole number of at least 2"),
        (Literal["a", "b"], ["a"], ["c", 3, ["a"]], "one of 'a', 'b'"),
        (str, ["x", ""], [3, ["x"], {"x": 1}], "text"),
        (list[str] | str, [["a"], "a"], [3, {}], "a list of text or text"),
        (tuple[int, str], [[1, "a"]], [3, [1], [1, "a", 2]], "a list of 2: a whole number, text"),
        (dict[str, int], [{"a": 1}], [3, ["a"]], "a mapping of names to a whole number"),
        (ToolLimits, [{"cache_size": 3}], [3, [1]], "class_path and init_args of a ToolLimits"),
    ],
)
def test_a_value_fits_or_is_shown_beside_what_the_option_takes(hint, good, bad, words):
    assert option_types.describe(hint) == words
    for value in good:
        assert option_types.misfit(value, hint, "x", import_class) is None, value
    for value in bad:
        fault = option_types.misfit(value, hint, "x", import_class)
        assert fault is not None and fault.endswith(f"; expected {words}") and fault.startswith("'x' is "), value


def test_a_range_s_own_validator_is_heard():
    said = option_types.misfit(0, TopK | None, "x", import_class)
    assert said == "'x' is 0; expected -1 (all tokens) or at least 1"


def test_a_fault_names_the_innermost_part():
    hint = dict[str, list[PositiveInt]] | None
    fault = option_types.misfit({"a": [1, 0]}, hint, "x", import_class)
    assert fault == "'x.a[1]' is 0; expected a whole number of at least 1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--data.rollouts.environment.tools={search: 3}"],
            "tools.search' is 3; expected class_path and init_args of a T",
        ),
        (["--data.rollouts.environment.limits={cach_size: 3}"], "cach_size': ToolLimits .*; did you mean 'cache_size'"),
        (["--data.rollouts.reward.class_path=rollout.rewards.qa.F1Rewardd"], "no class 'F1Rewardd'.*'F1Reward'"),
        (
            ["--data.rollouts.engine.dtype=float7"],
            "dtype' is 'float7'; expected one of 'float32', 'bfloat16'",
        ),
        (["--data.rollouts.sampler=rollout.samplers.branching.BranchingSampler"], "initial_rollouts' is missing"),
        (
            [
                "--data.rollouts.protocol=rollout.protocols.hermes.HermesProtocol",
                "--data.rollouts.protocol.show_tools=false",
            ],
            "unknown key '.*show_tools': .*; now tools_in: .* tools_in: trained for show_tools: false",
        ),
        (
            ["--model=lightning_modules.algorithms.sod.SOD", "--model.reference_step=first"],
            "unknown key '.*reference_step': .*; now reference_turn",
        ),
        (
            ["--model=lightning_modules.algorithms.sod.SOD", "--model.opd_mode=stepwise"],
            "'model.opd_mode' is 'stepwise'; now divergence_ratio",
        ),
        (
            ["--data.rollouts.engine.class_path=rollout.engines.server.engine.ServerEngine"],
            "no module 'rollout.engines.server.*'rollout.engines.vllm_servers.engine.VLLMServers'",
        ),
        (
            [
                "--data.rollouts.engine=rollout.engines.vllm_servers.engine.VLLMServers",
                '--data.rollouts.engine.urls=["http://a"]',
                "--data.rollouts.engine.model=m",
                "--data.rollouts.engine.transport=shared_memory",
            ],
            "transport' is 'shared_memory'; now files",
        ),
        (
            ["--data.rollouts.engine.weight_transfer=nccl"],
            "unknown key '.*weight_transfer': .*; leave it out: make engine ARGS='--transport nccl'",
        ),
        (
            ["--trainer.callbacks.x.class_path=callbacks.evaluation.step_divergence.StepDivergence"],
            "no module 'callbacks.evaluation.step_div.*'callbacks.evaluation.turn_divergence.TurnDivergence'",
        ),
        (
            ["--trainer.callbacks.guard.class_path=callbacks.colapse_guard.CollapseGuard"],
            "no module 'callbacks.colapse_guard'; use 'callbacks.training.collapse_guard.CollapseGuard'",
        ),
        (["--model.lr=null"], "'model.lr' is null; expected a value"),
        (["--data.eval_sampling=3"], "eval_sampling' is 3; expected"),
        (["--data.train_files=[3]"], r"'data.train_files\[0\]' is 3; expected text"),
        (["--model=lightning_modules.algorithms.ppo.POP"], "no class 'POP' in .*; did you mean 'PPO'"),
        (["--model=3"], "'model.class_path' is missing"),
        (["--data=data_modules.supervised_data_module.SupervisedDataModule"], "'data.trajectories' is missing"),
        (["--trainer.callbacks+=rollout.rewards.qa.ExactMatchReward"], "ExactMatchReward does not fit Callback"),
        (["--seed_everything+=3"], r"'seed_everything' is \[3\]"),
    ],
)
def test_a_wrong_override_is_one_sentence(overrides, message):
    with pytest.raises(ExperimentError, match=message) as caught:
        check_with(*overrides)
    one_line(caught)


def blocks(value, path="", found=None):
    """Every object of a configuration with its path."""
    found = [] if found is None else found
    if isinstance(value, dict):
        if "class_path" in value:
            found.append((path, value))
        for key, item in value.items():
            blocks(item, f"{path}.{key}", found)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            blocks(item, f"{path}[{i}]", found)
    return found


def test_every_option_of_a_configuration_refuses_what_it_cannot_take_in_one_line():
    refused, passed = 0, set()
    for path, block in blocks(resolved()):
        for key in block.get("init_args") or {}:
            for wrong in ({"no": {"such": "value"}}, [[[]]], "no such value"):
                changed = copy.deepcopy(block)
                changed["init_args"][key] = wrong
                try:
                    check_names(changed, path, "x")
                    passed.add((key, str(wrong)))
                except ExperimentError as error:
                    assert "\n" not in str(error) and not [word for word in JARGON if word in str(error)], str(error)
                    assert key in str(error)
                    refused += 1
    assert refused > 120
    assert not [key for key, wrong in passed if wrong.startswith(("{", "["))], "no option of this file takes these"


def trainer(options):
    check_arguments(Trainer, "Trainer", options, "trainer", "x", trainer_options.TYPES)
    trainer_options.check_values(options, "x")
    trainer_options.check_by_lightning(options, "x")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("max_steps", [-7, 0, "soon", "nan", 1.5]),
        ("max_epochs", [-1, -2, 0, "nan"]),
        ("min_epochs", [0, -1]),
        ("limit_train_batches", [-1, 0, 1.5, float("nan"), float("inf")]),
        ("limit_val_batches", [-1, 1.5, float("nan")]),
        ("limit_test_batches", [-0.1, float("inf")]),
        ("limit_predict_batches", [1]),
        ("overfit_batches", [1, 0.5]),
        ("accumulate_grad_batches", [0, -1, "a"]),
        ("gradient_clip_val", [-1, float("nan")]),
        ("gradient_clip_algorithm", ["cube"]),
        ("log_every_n_steps", [-1, 1.5]),
        ("devices", [0, -3, "two", 1.5, True, [0, 0], [], "0,0", "nan"]),
        ("num_nodes", [0, -1]),
        ("precision", [33, "half", "transformer-engine"]),
        ("val_check_interval", [0, -1, 1.5, float("nan"), "soon", "00:00:00:00", {"hours": -1}, {"ours": 1}]),
        ("check_val_every_n_epoch", [0, -1]),
        ("num_sanity_val_steps", [-2]),
        ("fast_dev_run", [-1, "maybe"]),
        ("max_time", ["soon", "1:00", "00:00:00:00", {"hours": 0}, {"ours": 1}]),
        ("barebones", [True]),
        ("profiler", ["fast"]),
        ("deterministic", ["maybe"]),
        ("accelerator", ["tpu", 3]),
        ("sync_batchnorm", [True]),
        ("use_distributed_sampler", [True]),
        ("reload_dataloaders_every_n_epochs", [1]),
        ("default_root_dir", ["/tmp/x"]),
        ("model_registry", ["x"]),
    ],
)
def test_trainer_options_that_no_run_can_use_are_refused(option, wrong):
    for value in wrong:
        with pytest.raises(ExperimentError, match=option) as caught:
            trainer({option: value})
        one_line(caught)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 5, "min_steps": 2, "max_epochs": -1},
        {"max_time": "00:12:00:00"},
        {"limit_train_batches": 3, "limit_val_batches": 0, "limit_test_batches": 0.5},
        {"devices": "0,1"},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": None, "val_check_interval": 10},
        {"precision": "bf16-mixed", "profiler": "simple", "deterministic": "warn"},
        {"log_every_n_steps": 0},
    ],
)
def test_trainer_options_that_a_run_can_use_pass(options):
    trainer(options)


@pytest.mark.parametrize(
    "options",
    [
        {"min_steps": 9, "max_steps": 5},
        {"devices": -1, "accelerator": "cpu"},
        {"precision": "16-mixed", "accelerator": "cpu"},
        {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
        {"enable_checkpointing": False, "callbacks": [{"class_path": "callbacks.training.resume.IterationCheckpoint"}]},
    ],
)
def test_trainer_options_that_contradict_are_refused(options):
    with pytest.raises(ExperimentError) as caught:
        trainer(options)
    one_line(caught)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flsh"])
def test_attention_that_cannot_be_had_is_refused(attention, monkeypatch):
    monkeypatch.setattr("lightning_modules.models.packing.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^attention is '"):
        check_available(attention)
    for name in ("sdpa", "eager", "flex_attention", "packed"):
        check_available(name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": {"init_args": {"liger": True}}, "trainer": {"accelerator": "cpu"}}, "liger is true, .*CUDA"),
        ({"trainer": {"strategy": "zero3"}}, "this trainer.strategy needs the package deepspeed"),
        (
            {"data": {"class_path": "rollout.engines.vllm_engine.VLLMEngine", "init_args": {}}},
            "VLLMEngine needs the package vllm",
        ),
    ],
)
def test_packages_that_are_not_installed_are_refused(config, message, monkeypatch):
    monkeypatch.setattr("experiments.stages.requirements.find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=message):
        check_packages(config, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Qwen3 0.6B", "is not a name of the hub"),
        ("Qwen3-0.6B", "no model folder"),
        ("docs", "no config.json"),
        ("who/.hidden", "is not a name of the hub"),
    ],
)
def test_a_malformed_model_is_refused(name, message):
    engine = {"class_path": "x.Engine", "init_args": {"model": name}}
    for section, value in (("model", {"init_args": {"policy": name}}), ("data", {"engine": engine})):
        [line] = missing_files(Stage("x", "fit", "", Path("/none"), {section: value}, (), (), ()), ROOT)
        assert message in line and line.endswith("give a Hugging Face folder, or owner/name[@revision] of the hub")


def test_a_name_of_the_hub_passes():
    for name in ("Qwen/Qwen3-0.6B", "a_b/c.d"):
        config = {"model": {"init_args": {"policy": name, "teacher": name, "lr": 1}}}
        assert not missing_files(Stage("x", "fit", "", Path("/none"), config, (), (), ()), ROOT)


def test_another_class_of_a_callback_takes_its_place():
    callbacks = {"log": {"class_path": "c.Log", "init_args": {"n": 1}}}
    changed, rest = apply(
        {"trainer": {"callbacks": callbacks}}, parse(["--trainer.callbacks.log.class_path=c.Other"]).own
    )
    assert changed["trainer"]["callbacks"]["log"] == {"class_path": "c.Other", "init_args": {}} and not rest
