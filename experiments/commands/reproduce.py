"""``make reproduce``: trains several seeds of an experiment and of its ablations and writes a results page."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.commands.command import command, make_graph, named, numbers, option
from experiments.commands.preconditions import ALLOW, require_gates
from experiments.launch import runner
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from experiments.stages.graph import Stage
from experiments.stages.store import StageFolder


@command(
    "reproduce",
    "train several seeds of an experiment and its ablations, then write a results page",
    option("--seeds", default="0,1,2", help="comma-separated"),
    option("--ablation-seeds", help="seeds of the ablations, a part of --seeds; default: all"),
    ALLOW,
)
def reproduce(args: argparse.Namespace, context: RunContext) -> None:
    """Train several seeds of the experiment and of its ablations, then write the results page
    docs/results/NAME.{md,json}. Hand-written parts of an existing page stay (``notes_of``). Finished stages are reused.
    Experiments with ``preconditions`` first measure their gates on all seeds.

    Raises:
        ExperimentError: seeds that are not numbers, or an ablation seed that is not among ``--seeds``.
        StageFailed: a stage or a gate failed; the next call continues from there.
    """
    context = dataclasses.replace(context, compare=True)
    shown = named(context, "reproduce", SEEDS=args.seeds, ABLATION_SEEDS=args.ablation_seeds, ALLOW=args.allow)
    seeds = numbers("--seeds", args.seeds, "0,1,2")
    ablation_seeds = numbers("--ablation-seeds", args.ablation_seeds, "0,1,2") if args.ablation_seeds else seeds
    if extra := sorted(set(ablation_seeds) - set(seeds)):
        raise ExperimentError(f"--ablation-seeds: found {extra}, which are not in --seeds {seeds}; take a part of them")
    rows: list[dict[str, Any]] = []
    about = make_graph(context).target().config["experiment"]
    runs = list(planned(context, about, seeds, ablation_seeds))
    require_possible(runs)
    gates = {}
    for seed in seeds if about.get("preconditions") else ():
        seeded = dataclasses.replace(context, seed=seed)
        gates[seed] = require_gates(make_graph(seeded), seeded, args.allow, shown=shown)
    for one in runs:
        rows += make_rows(one)
    from experiments.reports.preconditions import gates_of_seeds
    from experiments.reports.report import write_results  # imported late: torch would take memory for hours
    from experiments.reports.results_page import notes_of

    results = context.project.root / "docs" / "results"
    page = results / f"{context.target}.md"
    chosen = {"columns": about.get("columns"), "score": about.get("score")}
    texts = {
        "notes": notes_of(page.read_text()) if page.is_file() else "",
        "gates": gates_of_seeds(gates) if gates else "",
    }
    for path in write_results(context.target, rows, results, shown.command(), **chosen, **texts):
        print(f"  written {context.project.relative(path)}")


def planned(
    context: RunContext, about: Mapping[str, Any], seeds: Sequence[int], ablation_seeds: Sequence[int]
) -> Iterator[RunContext]:
    """Yield a context for the experiment and for each ablation, by seed."""
    for seed in seeds:
        ablations = (about.get("ablations") or []) if seed in ablation_seeds else []
        once = (about.get("ablations_once") or []) if seed == seeds[0] else []
        for name in (context.target, *ablations, *once):
            yield dataclasses.replace(context, seed=seed, target=name)


def require_possible(runs: Sequence[RunContext]) -> None:
    """Check all runs before the first one trains.

    Raises:
        ExperimentError: overrides that an ablation does not know, or that reach an experiment in one place and not in
            another (a table would mix the two), or a missing input.
    """
    folders: dict[tuple[str, int], Path] = {}
    stages: dict[Path, Stage] = {}
    for context in runs:
        graph = make_graph(context)
        for stage in graph.plan(compare=True):
            stages[stage.folder] = stage
            if folders.setdefault((stage.name, stage.config["seed_everything"]), stage.folder) != stage.folder:
                raise ExperimentError(
                    f"the overrides reach '{stage.name}' where it is reproduced, but not where '{context.target}' "
                    "needs it, so that the table would mix two settings; write the options into an experiment instead "
                    "(docs/concepts.md)"
                )
    runner.require_needs(runner.to_make(list(stages.values())))


def make_rows(context: RunContext) -> list[dict[str, Any]]:
    """Run the experiment and those that it is compared with, and return one results row per test."""
    graph = make_graph(context)
    target, compared = runner.make(graph, context)
    return [result_row(stage) for stage in (*compared, target) if StageFolder(stage.folder).is_tested]


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
