"""Numbers that no run can be meant with are refused where configurations are read: every numeric option of every class
that a configuration can name has a range (``common.ranges``), and its range refuses them."""

import importlib
import inspect
import math
import pkgutil
import typing

import pytest
from jsonargparse import _typehints
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages import validate
from experiments.stages.graph import Graph
from retrieval import protocols
from rollout.system import RolloutSystem

ROOMS = ("callbacks", "common", "data_modules", "experiments.worlds", "lightning_modules", "retrieval", "rollout")
# Code of other processes, partly of other environments.
NOT_IMPORTED = (
    "rollout.tools.python.sandbox_runtime", "rollout.engines.vllm_backend", "rollout.programs.verifiers_worker",
    "experiments.worlds.adapters.openenv_server",
)  # fmt: skip
# Classes that take numbers from other classes, never from a configuration.
INTERNAL = ("Budgets", "Correction", "Hooks", "PromptGroup", "Request", "Slots")

# Options for which a value of the sweep is legitimate. A float of 0 switches off what it weighs: legitimate.
NEGATIVE = {
    "AEPO.entropy_weight", "AEPOSampler.monitor_weight", "BranchingSampler.entropy_weight",
    "CommandProgram.failure_reward", "DGPO.success_threshold", "PythonProgram.failure_reward",
    "Decoding.top_k", "EntropyScaling.weight", "ExactMatchReward.format_score", "GymnasiumText.success_return",
    "AttemptPrompts.success_threshold", "LessonPrompts.success_threshold",
    "IncorrectOnly.success_threshold", "OpenEnv.success_return", "VerifiersProgram.failure_reward",
}  # fmt: skip
ZERO_INTEGERS = {
    "after",
    "bucket_batches", "cache_size", "critic_warmup_steps", "entropy_tokens", "held_out", "lcb_examples", "max_calls",
    "max_off_policy_iterations", "max_turns", "persistence_threshold", "restarts", "retries", "seed", "test_unseen",
    "LocalSandbox.threads", "train_every", "warm", "warmup_steps", "window",
}  # fmt: skip


def ours(kind):
    return inspect.isclass(kind) and kind.__module__.startswith(tuple(f"{room}." for room in ROOMS))


def all_classes():
    found = set()
    for room in ROOMS:
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + "."):
            if not module.name.startswith(NOT_IMPORTED) and not module.name.endswith("__main__"):
                found.update(filter(ours, vars(importlib.import_module(module.name)).values()))
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def parts(annotation):
    """The types that an annotation is made of; a named range is one of them."""
    arguments = typing.get_args(annotation)
    if not arguments or typing.get_origin(annotation) is typing.Literal:
        return [annotation]
    return [part for argument in arguments for part in parts(argument)]


def options(kind):
    """(name, annotation, as jsonargparse sees it) of the constructor, ``**kwargs`` followed to the bases'."""
    for base in filter(ours, kind.__mro__):
        if "__init__" in vars(base):
            try:
                hints = typing.get_type_hints(base.__init__)
            except NameError:  # imported for type checkers only: no configuration gives such an object
                return
            parameters = inspect.signature(base.__init__).parameters.values()
            yield from ((f"{base.__name__}.{p.name}", hints[p.name]) for p in parameters if p.name in hints)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                return


def fitting(kind, classes):
    """Classes whose objects can be given where ``kind`` is expected."""
    if not ours(kind):
        return []
    if _typehints.is_protocol(kind):
        methods = _typehints.get_protocol_members(kind)
        return [c for c in classes if not _typehints.is_protocol(c) and protocols.mismatch(c, kind, methods) is None]
    return [c for c in classes if issubclass(c, kind)]


def is_root(kind):
    run = getattr(kind, "run", None)
    is_task = callable(run) and "output_dir" in inspect.signature(run).parameters
    return is_task or issubclass(kind, LightningModule | LightningDataModule | Callback | Logger | Strategy)


@pytest.fixture(scope="module")
def numeric_options():
    """{"Class.option": the parts of its annotation that are numbers}, of all classes that a configuration can name."""
    classes = [c for c in all_classes() if c.__name__ not in INTERNAL and not c.__name__.startswith("_")]
    waiting, seen, found = [c for c in classes if is_root(c)] + [RolloutSystem], set(), {}
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for name, annotation in options(kind):
            numbers = [p for p in parts(annotation) if p in (int, float) or isinstance(p, TypeAliasType)]
            if numbers:
                found[name] = numbers
            waiting += [c for part in parts(annotation) for c in fitting(part, classes)]
    return found


def accepts(range_, value):
    try:
        TypeAdapter(range_).validate_python(value)
    except ValidationError:
        return False
    return True


def test_every_numeric_option_has_a_range(numeric_options):
    assert len(numeric_options) > 250  # the search has found the rooms
    bare = [name for name, numbers in numeric_options.items() if int in numbers or float in numbers]
    assert not bare, f"annotate with a type of common.ranges: {bare}"


@pytest.mark.parametrize("value", [math.nan, math.inf, True])
def test_no_range_takes_what_is_no_finite_number(numeric_options, value):
    assert not [name for name, numbers in numeric_options.items() if any(accepts(n, value) for n in numbers)]


def test_negative_numbers_are_refused(numeric_options):
    assert {name for name, numbers in numeric_options.items() if any(accepts(n, -1) for n in numbers)} == NEGATIVE


def test_counts_of_zero_are_refused(numeric_options):
    whole = {name: [n for n in numbers if not accepts(n, 0.5)] for name, numbers in numeric_options.items()}
    accepted = {name for name, numbers in whole.items() if any(accepts(n, 0) for n in numbers)}
    found = {name if name in ZERO_INTEGERS else name.partition(".")[2] for name in accepted}
    assert found == ZERO_INTEGERS


def test_the_dry_run_refuses_a_group_with_nothing_to_compare():
    stage = Graph(Project(), "arpo_tiny", parse(["--data.group_size=1"])).target()
    with pytest.raises(ExperimentError, match="'arpo_tiny': data.group_size is 1, so that every group advan"):
        validate.check(stage, ROOT)
