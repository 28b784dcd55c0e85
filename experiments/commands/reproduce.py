"""``make reproduce``: trains several seeds of an experiment and of its ablations and writes a results page."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path
from typing import Any

from experiments.commands.command import command, make_graph, named, numbers, option
from experiments.commands.models import evaluation_stage
from experiments.commands.preconditions import ALLOW, require_gates
from experiments.launch import runner
from experiments.stages.context import RunContext
from experiments.stages.graph import Graph, Stage
from experiments.stages.store import StageFolder

# DGPO's released code validates at temperature 1 although greedy decoding is configured (docs/papers/dgpo.md 2.4), so
# its tables report sampled answers. Every model is also tested in this way, unless the experiment says `sampled: false`
# because its test samples already.
SAMPLED = {"temperature": 1.0}


@command(
    "reproduce",
    "train several seeds of an experiment and its ablations, then write a results page",
    option("--seeds", default="0,1,2", help="comma-separated"),
    option("--ablation-seeds", help="seeds of the ablations, a part of --seeds; default: all"),
    ALLOW,
)
def reproduce(args: argparse.Namespace, context: RunContext) -> None:
    """Train several seeds of the experiment and of its ablations, then write the results page
    docs/results/NAME.{md,json}. Finished stages are reused. Experiments with ``preconditions`` first measure their
    gates on all seeds.

    Raises:
        ExperimentError: seeds that are not numbers.
        StageFailed: a stage or a gate failed; the next call continues from there.
    """
    context = dataclasses.replace(context, compare=True)
    shown = named(context, "reproduce", SEEDS=args.seeds, ABLATION_SEEDS=args.ablation_seeds, ALLOW=args.allow)
    seeds = numbers("--seeds", args.seeds, "0,1,2")
    ablation_seeds = numbers("--ablation-seeds", args.ablation_seeds, "0,1,2") if args.ablation_seeds else seeds
    rows: list[dict[str, Any]] = []
    about = make_graph(context).target().config["experiment"]
    sampled = about.get("sampled", True)
    gates = {}
    for seed in seeds if about.get("preconditions") else ():
        seeded = dataclasses.replace(context, seed=seed)
        gates[seed] = require_gates(make_graph(seeded), seeded, args.allow, shown=shown)
    for seed in seeds:
        seeded = dataclasses.replace(context, seed=seed)
        rows += make_rows(seeded, sampled)
        block = make_graph(seeded).target().config["experiment"]
        ablations = (block.get("ablations") or []) if seed in ablation_seeds else []
        once = (block.get("ablations_once") or []) if seed == seeds[0] else []
        for name in [*ablations, *once]:
            rows += make_rows(dataclasses.replace(seeded, target=name), sampled)
    from experiments.reports.preconditions import gates_of_seeds
    from experiments.reports.report import write_results  # imported late: torch would take memory for hours

    results = context.project.root / "docs" / "results"
    notes = results / f"{context.target}_notes.md"  # written by hand
    text = notes.read_text() if notes.is_file() else ""
    if gates:
        text += f"\n{gates_of_seeds(gates)}"
    chosen = {"columns": about.get("columns"), "score": about.get("score")}
    for path in write_results(context.target, rows, results, shown.command(), **chosen, notes=text):
        print(f"  written {context.project.relative(path)}")


def make_rows(context: RunContext, sampled: bool) -> list[dict[str, Any]]:
    """Run the experiment and those that it is compared with, and return one results row per test. ``sampled`` adds
    tests with sampled answers."""
    graph = make_graph(context)
    target, compared = runner.make(graph, context)
    tested = [stage for stage in (*compared, target) if StageFolder(stage.folder).evaluation.is_file()]
    return [
        result_row(stage) | ({"sampled": make_sampled(stage, graph, context)} if sampled else {}) for stage in tested
    ]


def make_sampled(stage: Stage, graph: Graph, context: RunContext) -> Path:
    """Test a finished stage's model with sampled instead of greedy answers, once. Return the folder of the test."""
    config = copy.deepcopy(stage.config)
    data = config["data"]["init_args"]
    data["eval_sampling"], data["diagnostic_prompts"] = SAMPLED, []
    changed = dataclasses.replace(stage, config=config, key=f"{stage.key}, sampled")
    evaluation = evaluation_stage(changed, model_of(stage), graph)
    if StageFolder(evaluation.folder).result() is None:
        print(f"  {stage.name}, seed {stage.config['seed_everything']}: testing with sampled answers", flush=True)
        runner.make_stage(evaluation, context, fresh=False)
    return evaluation.folder


def model_of(stage: Stage) -> Path:
    """Return the path of the model that a finished stage has tested."""
    return stage.folder / "model" if stage.kind == "fit" else Path(stage.config["model"]["init_args"]["policy"])


def result_row(stage: Stage) -> dict[str, Any]:
    """Return the fields of a finished stage's ``reports.results.Run``."""
    result = StageFolder(stage.folder).result() or {}
    return {
        "experiment": stage.name,
        "method": stage.label,
        "group": stage.config["experiment"].get("group"),
        "seed": stage.config["seed_everything"],
        "fixed_seed": bool(stage.config["experiment"].get("fixed_seed")),
        "folder": stage.folder,
        **{key: result[key] for key in ("seconds", "command", "commit")},
    }
