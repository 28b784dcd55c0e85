"""Finds the models of experiments and tests them (``make evaluate``). Imports without torch."""

from __future__ import annotations

import argparse
import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.commands.command import command, make_graph, named, option
from experiments.launch import runner
from experiments.registry.errors import ExperimentError
from experiments.registry.files import Config, data_arguments
from experiments.registry.overrides import Overrides
from experiments.stages.context import RunContext
from experiments.stages.graph import Graph, Stage, require_files
from experiments.stages.store import StageFolder

TRUST = option(
    "--trust", action="store_true", help="read a DeepSpeed checkpoint from outside the outputs; it can run code"
)
SHARDS = "checkpoint"  # folder of a DeepSpeed checkpoint with its files, which are pickles

EVALUATE_ONLY = "lightning_modules.training.policy_module.EvaluateOnly"


def trained_stage(context: RunContext) -> Stage:
    """Return the stage that trained the experiment's model. If no stage with these overrides was trained, return the
    one without overrides, which then only change how the model is used. Raises ExperimentError for a served model."""
    overridden = make_graph(context).target()
    refuse_served(overridden)
    plain = Graph(context.project, context.target, Overrides(), context.seed).target()
    made = [stage for stage in (overridden, plain) if StageFolder(stage.folder).result() is not None]
    return [*made, overridden][0]


def find_model(context: RunContext, checkpoint: str | None, trust: bool = False) -> Path:
    """Return the path of a model: ``checkpoint`` (a .ckpt or model folder), or without it the model that the experiment
    trains (kind test: tests).

    Raises:
        ExperimentError: a missing path, neither a checkpoint nor a model folder, or an untrusted DeepSpeed checkpoint
            from outside the outputs.
    """
    if checkpoint is None:
        stage = trained_stage(context)
        if stage.kind != "test":
            return runner.folder_of(context, stage) / "model"
        checkpoint = str(context.project.root / stage.config["model"]["init_args"]["policy"])
    path = Path(checkpoint)
    if not path.exists():
        raise ExperimentError(f"no checkpoint at {checkpoint}; correct CKPT")
    if path.is_dir() and (path / "model" / "config.json").is_file():
        return path / "model"  # a stage's folder
    if not is_model_folder(path) and path.suffix != ".ckpt":
        raise ExperimentError(f"{checkpoint}: expected a .ckpt or a Hugging Face folder with config.json")
    ours = path.resolve().is_relative_to(context.project.outputs.resolve())
    if (path / SHARDS).is_dir() and not ours and not trust:
        trusted = context.command(CKPT=checkpoint, TRUST=1)
        raise ExperimentError(
            f"{checkpoint} is a DeepSpeed checkpoint from outside the outputs: its files are pickles, which can run "
            f"code when read. If you trust its author: {trusted}"
        )
    return path


def is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def evaluation_stage(target: Stage, path: Path, graph: Graph) -> Stage:
    """Return a stage that tests the model at ``path`` as the experiment does. A model folder replaces the policy; a
    .ckpt is loaded into the experiment's module."""
    digest = hashlib.sha256(f"{target.key} {graph.hasher(path)}".encode()).hexdigest()[:12]
    graph.hasher.save()
    folder = target.folder.parent / f"evaluate-{digest}"
    config = copy.deepcopy(target.config)
    config["experiment"] |= {"kind": "test", "folder": graph.project.relative(folder)}
    config["trainer"].pop("num_nodes", None)  # a test runs on one node without a launcher
    logger = (config["trainer"].get("logger") or {}).get("init_args")
    if logger is not None:
        logger |= {"run_name": f"{target.name}-{path.name}", "save_dir": str(folder)}
    if is_model_folder(path):
        config["model"] = {"class_path": EVALUATE_ONLY, "init_args": {"policy": str(path)}}
        rollouts_of(config)["init_args"]["engine"]["init_args"]["model"] = str(path)
    return replace(target, kind="test", key=digest, folder=folder, config=config)


def is_served_elsewhere(config: Config) -> bool:
    """Return whether the experiment has no model of its own, because its engine is a ``ServedModel``."""
    return ((config.get("model") or {}).get("init_args") or {}).get("policy", "") is None


def refuse_served(stage: Stage) -> None:
    """Raise ExperimentError if the experiment's model is served elsewhere."""
    if is_served_elsewhere(stage.config):
        raise ExperimentError(f"the model of '{stage.name}' is served elsewhere and has no folder; make train tests it")


def rollouts_of(config: Config) -> Config:
    """Return the part of a configuration that describes the rollout system. Raises ExperimentError if it has none."""
    rollouts = data_arguments(config).get("rollouts")
    if not rollouts:
        raise ExperimentError(
            f"'{config['experiment']['name']}' has no rollout system, so it cannot search or answer; use another EXP"
        )
    return rollouts


def published_results(stages: Sequence[Stage]) -> str:
    """Return a line of text with the paper's result for each stage that reproduces one; "" without such stages."""
    said = [(stage.label, str(stage.config["experiment"].get("reproduces") or "")) for stage in stages]
    return "".join(f"\n  published, {label}: {what}" for label, what in said if any(map(str.isdigit, what)))


@command(
    "evaluate",
    "test a checkpoint or model folder as the experiment does",
    option("--checkpoint", help="a .ckpt of this experiment or a model folder; default: its final model"),
    TRUST,
)
def evaluate(args: argparse.Namespace, context: RunContext) -> None:
    """Test a checkpoint or model folder in a separate stage, and print its row of the results table.

    Raises:
        ExperimentError: a missing checkpoint, or one with another tokenizer than the experiment's.
    """
    graph, checkpoint = make_graph(context), args.checkpoint
    target = graph.target()
    if target.kind == "task":
        raise ExperimentError(
            f"'{target.name}' is of kind task and has no model; evaluate an experiment of kind fit or test"
        )
    refuse_served(target)
    if checkpoint is None and target.kind == "test":
        runner.require_needs([target])  # says how to get its model
    context = named(context, "evaluate", CKPT=checkpoint, TRUST=1 if args.trust else None)
    path = find_model(context, checkpoint, args.trust)
    runner.require_unaltered(path)
    stage = evaluation_stage(target, path, graph)
    for upstream in target.upstream:
        runner.folder_of(context, upstream)  # world and index, made by train
    require_files([stage], context.project.root)
    if is_model_folder(path):
        require_same_tokenizer(path, rollouts_of(stage.config)["init_args"]["protocol"]["init_args"]["tokenizer"])
    print(f"{target.name}: testing {context.project.relative(path.absolute())}", flush=True)
    runner.make_stage(stage, context, fresh=context.fresh, checkpoint=None if is_model_folder(path) else path)
    from experiments.reports.report import closing_table

    print(
        closing_table([(path.name, stage.folder)], target.config["experiment"].get("columns"))
        + published_results([target])
    )
    print(f"  metrics: {context.project.relative(stage.folder / 'evaluation.json')}")


def require_same_tokenizer(model: Path, tokenizer: str) -> None:
    """Raise ExperimentError if the vocabulary of a model folder's tokenizer differs from the experiment's."""
    from transformers import AutoTokenizer

    theirs, ours = (AutoTokenizer.from_pretrained(str(p)).get_vocab() for p in (model, tokenizer))
    if theirs != ours:
        raise ExperimentError(
            f"{model} has another tokenizer ({len(theirs)} entries) than this experiment ({tokenizer}, {len(ours)} "
            "entries); give the checkpoint's experiment with EXP"
        )
