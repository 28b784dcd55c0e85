"""The commands that make and inspect experiments; those that use a trained model are in ``use.py``.

Every function takes the parsed arguments and the request, prints, and raises ExperimentError for what the user has to
mend. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from callbacks.columns import columns_of
from callbacks.records import SQLITE, default_tracking_uri
from experiments import overrides, registry, runner
from experiments.errors import ExperimentError
from experiments.graph import Graph, Need, Stage, closure
from experiments.nodes import Crew
from experiments.request import Request, StageFailed
from experiments.store import StageFolder

INDEX_TASK = "retrieval.index.BuildIndex"
# Handed through to the server.
SERVER_OPTIONS = ("topk", "host", "threads", "device", "encoder", "corpus", "k1", "b", "java-heap", "announce")


def make_graph(request: Request) -> Graph:
    return Graph(request.project, request.target, overrides.parse(request.arguments), request.seed)


def list_experiments(args: argparse.Namespace, request: Request) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("experiment", "algorithm", "models", "data", "hardware", "reproduces"):
        table.add_column(title, overflow="fold", no_wrap=title == "experiment")
    for about in registry.listing(request.project):
        table.add_row(about.name, about.algorithm, about.models, about.data, about.hardware, about.reproduces)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print("Run one: make train EXP=NAME    See what it would do: make dry-run EXP=NAME")


def dry_run(args: argparse.Namespace, request: Request) -> None:
    """The resolved configuration, validated, and what the experiment stands on. `train` validates the stages under it
    in the same way before it runs the first."""
    graph = make_graph(request)
    target = graph.target()
    from experiments.validate import check

    notes = check(target, request.project.root)
    print(yaml.safe_dump(target.config, sort_keys=False, allow_unicode=True, width=110))
    stages = closure([target, *graph.compared(target)])
    runner.print_plan(stages, runner.to_make(stages), request)
    for need in unique_needs(stages):
        print(f"  needs: {need.path}{'' if need.present else ' -- not there yet'} ({need.how})")
    for note in notes:
        print(f"  note: {note}")
    print(f"the configuration of {target.name} is valid")


def unique_needs(stages: Sequence[Stage]) -> list[Need]:
    return list({need.path: need for stage in stages for need in stage.needs}.values())


def validate(args: argparse.Namespace, request: Request) -> None:
    """Check all stages that `train` would run, quietly, and that this machine has what they ask for."""
    graph = make_graph(request)
    target = graph.target()
    stages = closure([target, *graph.compared(target)])
    from experiments.validate import check

    for stage in runner.to_make(stages, fresh=target if args.fresh else None):
        if (notes := check(stage, request.project.root)) and not args.elsewhere:
            raise ExperimentError(notes[0])


def train(args: argparse.Namespace, request: Request) -> None:
    """Make everything, then the table and where things lie. With LAUNCH, see ``launch.py`` and ``slurm.py``."""
    from experiments import launch, slurm
    from experiments.work import help_out

    launch.require_no_rank(os.environ)
    graph = make_graph(request)
    target = graph.target()
    if args.launch is None:
        launch.require_no_options(args)
    else:
        ranks = launch.require_ranks(target.config, args)
        request = dataclasses.replace(request, variables=(f"LAUNCH={args.launch}",))
        if args.launch == "slurm":
            slurm.submit(graph, request, args, ranks)
            return
        here = launch.from_arguments(args, os.environ, ranks.nodes)
        if not here.leads:
            if StageFolder(target.folder).result() is None or args.fresh:
                help_out(here, request)
            print(f"{target.name} is done: {request.project.relative(target.folder)}")
            return
        crew, resumed_by = Crew(here, request.project), os.environ.get(slurm.AGAIN_VARIABLE)
        request = dataclasses.replace(request, launch=here, crew=crew, resumed_by=resumed_by)
    request.stop.install()
    code = 1
    try:
        target, compared = runner.make(graph, request)
        code = 0
    except StageFailed as error:
        code = error.exit_code
        raise
    finally:
        if request.crew is not None:
            request.crew.close(code)
    closing_table([*compared, target], target.config["experiment"].get("columns"))
    print_closing_words(target, request)


def closing_table(stages: Sequence[Stage], columns: Sequence[str] | None) -> None:
    """One line per stage that was tested (tasks, and stages that only prepare a model, are not)."""
    rows = [(s.label, s.folder) for s in stages if StageFolder(s.folder).evaluation.is_file()]
    if rows:
        from callbacks.report import closing_table as table_of

        print(f"\n{table_of(rows, columns)}")


def print_closing_words(target: Stage, request: Request) -> None:
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
            print(f"  {name:<14} {request.project.relative(path)}")
    if target.kind != "task":
        print("\nSee the runs in MLflow:   make ui")
        print(f'Ask the model something:  make ask EXP={target.name} Q="..."')


def status(args: argparse.Namespace, request: Request) -> None:
    graph = make_graph(request)
    target = graph.target()
    stages = closure([target, *graph.compared(target)])
    runner.print_plan(stages, runner.to_make(stages), request)


def run_stage(args: argparse.Namespace) -> int:
    from experiments.stage import run

    return run(args.folder, resume=args.resume)


def clean(args: argparse.Namespace, request: Request) -> None:
    """Remove stage folders that are not done and that nobody is working in; with ``--all`` all outputs."""
    removed = 0
    for folder in sorted(request.project.outputs.glob("*/*/")):
        state = StageFolder(folder).state() if (folder / "stage.json").is_file() else "done"
        if state == "running":
            print(f"  left alone: {request.project.relative(folder)} (a process is working in it)")
        elif state in ("interrupted", "unfinished") or (args.all and (folder / "stage.json").is_file()):
            print(f"  removed {request.project.relative(folder)} ({state})")
            shutil.rmtree(folder)
            removed += 1
    print(f"{removed} stage folders removed")


def compare(args: argparse.Namespace, request: Request) -> None:
    from callbacks.compare import CURVES
    from callbacks.report import compare as compare_runs

    metrics = dict.fromkeys((*CURVES, *chosen_metrics(args.names, request)))
    print(compare_runs(request.project.outputs, args.names, metrics=tuple(metrics)))


def chosen_metrics(names: Sequence[str], request: Request) -> list[str]:
    """Metrics behind the columns that the named experiments have chosen for their tables. Names of runs that are no
    experiment (patterns, files since removed) have none."""
    known = [name for name in names if name in registry.names(request.project)]
    blocks = [registry.load(name, request.project)["experiment"] for name in known]
    columns = [column for block in blocks for column in columns_of(block.get("columns") or []).values()]
    return [metric for column in columns for metric in column.metrics]


def ui(args: argparse.Namespace, request: Request) -> None:
    """MLflow's own interface over the embedded store, in the foreground."""
    store = default_tracking_uri(request.project.outputs)
    database = Path(store.removeprefix(SQLITE))
    if store.startswith(SQLITE) and not database.is_file():
        raise ExperimentError(f"there are no runs yet ({database} does not exist): make train first")
    require_free_port(args.port, "make ui PORT=5001")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    print(f"MLflow over {store}: http://127.0.0.1:{args.port} (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--port", str(args.port)]
    subprocess.run(command, env=environment, check=False)


def require_free_port(port: int, otherwise: str) -> None:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ExperimentError(f"port {port} is in use ({error.strerror}); choose another: {otherwise}") from None


def retriever(args: argparse.Namespace, request: Request) -> None:
    """The search server over the index that an experiment stands on, in the foreground."""
    index = args.index
    if index is None:
        graph = make_graph(request)
        stages = [s for s in closure([graph.target()]) if (s.config.get("task") or {}).get("class_path") == INDEX_TASK]
        if not stages:
            raise ExperimentError(f"'{request.target}' builds no index of its own: name one with --index DIR")
        index = str(runner.folder_of(request.project, stages[0]) / "index")
    require_free_port(args.port, "make retriever PORT=8001")
    command = [sys.executable, "-m", "retrieval.server", "--index", index, "--port", str(args.port)]
    where = f"http://{args.host or '127.0.0.1'}:{args.port}"
    print(f"search over {index}: POST {where}/retrieve (Ctrl-C ends it)", flush=True)
    code = subprocess.run([*command, *server_options(args)], cwd=request.project.root, check=False).returncode
    if code not in (0, -2, 130):
        raise StageFailed(f"the search server ended with exit code {code}", 1)


def engine_server(args: argparse.Namespace, request: Request) -> None:
    """The engine that an experiment configures, over HTTP, in the foreground."""
    from experiments.use import rollouts_of

    target = make_graph(request).target()
    engine = rollouts_of(target.config)["init_args"]["engine"]
    if args.checkpoint is not None:
        engine["init_args"]["model"] = args.checkpoint
    for upstream in target.upstream if args.checkpoint is None else ():
        runner.folder_of(request.project, upstream)  # the model's stage: made by train
    require_free_port(args.port, "make engine PORT=8101")
    words = ["--port", str(args.port), "--host", args.host, *(["--staging", args.staging] if args.staging else [])]
    command = [sys.executable, "-m", "rollout.engines.server", "--engine", json.dumps(engine), *words]
    print(f"loading {engine['init_args'].get('model')} into {engine['class_path']} (Ctrl-C ends it)", flush=True)
    code = subprocess.run(command, cwd=request.project.root, check=False).returncode
    if code not in (0, -2, 130):
        raise StageFailed(f"the engine server ended with exit code {code}", 1)


def server_options(args: argparse.Namespace) -> list[str]:
    """What was given of the server's own options, as its arguments; the server checks them."""
    given = {name: getattr(args, name.replace("-", "_")) for name in SERVER_OPTIONS}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    return [*words, "--gpu"] if args.gpu else words


def reproduce(args: argparse.Namespace, request: Request) -> None:
    from experiments.reproduce import reproduce as run

    run(args, request)


def size(args: argparse.Namespace, request: Request) -> None:
    from experiments.size import size as run

    run(args, request)


def evaluate(args: argparse.Namespace, request: Request) -> None:
    from experiments.use import evaluate as run

    run(make_graph(request), request, args.checkpoint)


def ask(args: argparse.Namespace, request: Request) -> None:
    from experiments.use import ask as run

    run(make_graph(request), request, args.question, args.temperature)


def export(args: argparse.Namespace, request: Request) -> None:
    from experiments.export import export as run

    run(args, request)
