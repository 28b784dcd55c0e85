"""Runs an experiment with everything it depends on (``train``), shows and validates its plan (``dry-run``,
``validate``, ``status``), or runs one prepared stage (``stage``)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from experiments.commands.command import COMPARE, command, make_graph, named, option, unique_needs
from experiments.commands.models import published_results
from experiments.commands.preconditions import ALLOW, require_gates
from experiments.launch import runner
from experiments.launch.shared_secret import share_secret
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage, closure
from experiments.stages.store import StageFolder

RESUME = "continue an interrupted stage (the default), and say so if no stage can be continued"
LAUNCH = "torchrun: start ranks on every node that runs this command; slurm: write and submit a job"


@command(
    "train",
    "run an experiment and all its stages, then show the results",
    COMPARE,
    ALLOW,
    option("--resume", choices=["last"], help=RESUME),
    option("--fresh", action="store_true", help="run the experiment's own stage again, even if it is finished"),
    option("--launch", choices=["torchrun", "slurm"], help=LAUNCH),
    option("--nodes", type=int, metavar="N", help="same as --trainer.num_nodes N"),
    option("--processes", type=int, metavar="N", help="ranks per node; same as --trainer.devices N"),
    option("--node-rank", type=int, metavar="R", help="this node's number; default: NODE_RANK, or 0"),
    option("--master-addr", metavar="HOST", help="address of node 0; default: MASTER_ADDR"),
    option("--master-port", type=int, metavar="P", help="port of node 0; default: MASTER_PORT, or 29400"),
    option("--sbatch", help="further options of the job, such as '--partition=gpu --time=24:00:00'"),
)
def train(args: argparse.Namespace, context: RunContext) -> None:
    """Run all stages of an experiment, then print the results and the paths of the files."""
    from experiments.launch import nodes, slurm

    graph = make_graph(context)
    target = graph.target()
    ranks = nodes.require_launchable(args, os.environ, target.config)
    context = named(context, LAUNCH=args.launch, ALLOW=args.allow)
    if args.launch == "slurm":
        slurm.submit(graph, context, args, ranks)
        return
    if args.launch == "torchrun":
        context = dataclasses.replace(context, node=nodes.this_node(args, os.environ, ranks.nodes))
    context.stop.install()
    if target.config["experiment"].get("preconditions") and runner.to_make([target]) and context.node is None:
        require_gates(graph, context, args.allow)
    target, compared = runner.make(graph, context)
    if not context.is_main_node:
        print(f"{target.name} is done: {context.project.relative(target.folder)}")
        return
    closing_table([*compared, target], target.config["experiment"].get("columns"))
    print_closing_words(target, context)


def closing_table(stages: Sequence[Stage], columns: Sequence[str] | None) -> None:
    """Print a table with one row for each tested stage. Tasks and stages that only prepare a model have no test."""
    rows = [(s.label, s.folder) for s in stages if StageFolder(s.folder).is_tested]
    if rows:
        from experiments.reports.report import closing_table as table_of

        print(f"\n{table_of(rows, columns)}{published_results(stages)}")


def print_closing_words(target: Stage, context: RunContext) -> None:
    folder = StageFolder(target.folder)
    places = {
        "folder": folder.path,
        "configuration": folder.config_path,
        "model": folder.path / "model",
        "evaluation": folder.evaluation,
        "trajectories": folder.path / "trajectories",
        "log": folder.log_path,
    }
    print()
    for name, path in places.items():
        if path.exists():
            print(f"  {name:<14} {context.project.relative(path)}")
    if target.kind != "task":
        print(f"\nSee the runs in MLflow:   {context.elsewhere('ui')}")
        from experiments.stages.classes import plays_episodes

        if not plays_episodes(target.config):
            print(f"Ask the model something:  {context.command('ask', Q='...')}")


@command("dry-run", "print the resolved configuration and validate it; loads no model", COMPARE)
def dry_run(args: argparse.Namespace, context: RunContext) -> None:
    """Validate an experiment without running it. Prints its resolved configuration to stdout, and its stages to stderr.
    Stages it depends on are validated only if ``--stages`` overrides change them; `train` validates all."""
    graph = make_graph(context)
    target = graph.target()
    from experiments.stages.data_files import check_data_files
    from experiments.stages.validate import check

    with contextlib.redirect_stdout(sys.stderr):  # messages of imported libraries
        changed = [stage for stage in closure(target.upstream) if stage.name in graph.overrides.stages]
        notes = [note for stage in (*changed, target) for note in check(stage, context.project.root, only=True)]
    print(yaml.safe_dump(target.config, sort_keys=False, allow_unicode=True, width=110), flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        stages = graph.plan(compare=context.compare)
        runner.print_plan(graph, runner.to_make(stages), context)
        for need in unique_needs(stages):
            print(f"  needs: {need.path}{'' if need.present else ' -- missing'} ({need.how})")
        for line in check_data_files(stages, context.project.root).lines():
            print(f"  data: {line}")
        for note in notes:
            print(f"  note: {note}")
        print(f"the configuration of {target.name} is valid")


@command(
    "validate",
    "validate the stages that `train` would run, quietly",
    COMPARE,
    option("--fresh", action="store_true"),
    option("--elsewhere", action="store_true", help="for another machine: ignore this machine's devices"),
)
def validate(args: argparse.Namespace, context: RunContext) -> None:
    """Check all stages that `train` would run, their existing data files, and whether this machine has the needed
    devices. Prints only data that is left out."""
    graph = make_graph(context)
    target = graph.target()
    from experiments.stages.data_files import check_data_files
    from experiments.stages.validate import check

    todo = runner.to_make(graph.plan(compare=context.compare), fresh=target if args.fresh else None)
    for stage in todo:
        if (notes := check(stage, context.project.root, only=True)) and not args.elsewhere:
            raise ExperimentError(notes[0])
    for line in check_data_files(todo, context.project.root, count=False).lines(quiet=True):
        print(f"  data: {line}", flush=True)


@command("status", "show which stages of an experiment are finished, and where they are", COMPARE)
def status(args: argparse.Namespace, context: RunContext) -> None:
    """Print which stages of the experiment are finished with these settings, then runs with other settings or seeds."""
    graph = make_graph(context)
    plan = graph.plan(compare=context.compare)
    runner.print_plan(graph, runner.to_make(plan), context, plan)
    others = [(stage, run) for stage in plan for run in runner.other_runs(stage)]
    print(f"  with other settings or seeds: {len(others)} runs")
    for stage, run in others:
        print(f"  {stage.name}  {runner.describe_run(run, stage)}")


@command("stage", "run one prepared stage folder", option("folder", type=Path), experiment=False, overrides=False)
def stage(args: argparse.Namespace, context: RunContext) -> int:
    """Run one prepared stage folder. The runner calls this in a child process; called by hand, it runs in the
    foreground, without a log or result.json."""
    from experiments.stages.stage import PARENT_VARIABLE, execute, run, set_environment

    if PARENT_VARIABLE in os.environ:
        return run(args.folder)
    store = StageFolder(args.folder.absolute())
    if not store.metadata():
        raise ExperimentError(
            f"no prepared stage in {args.folder}; expected outputs/NAME/KEY, which make train prepares"
        )
    if store.result() is not None:
        raise ExperimentError(f"the stage in {args.folder} is done; to prepare it again, add FRESH=1 to make train")
    share_secret(store.path.parents[1])
    os.environ.update(set_environment(dict(os.environ)))
    with store.lock.held(lambda owner: print(f"waiting for process {owner['pid']}, which works in the folder")):
        execute(store.path)
    return 0
