"""Commands on the outputs: ``make compare``, ``make ui``, ``make metrics`` and ``make clean``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from callbacks.tracking.run_info import SQLITE, default_tracking_uri
from common.errors import one_line
from experiments.commands.command import COMPARE, answers, command, make_graph, option, require_free_port, serve
from experiments.registry import listing
from experiments.registry.columns import columns_of
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext
from experiments.stages.store import StageFolder

BOOKKEEPING = ("config.yaml", "stage.json", "log", "traceback.txt")


@command(
    "compare",
    "print a table of runs; for curves: make ui",
    option("names", nargs="*", help="only these experiments"),
    experiment=False,
    overrides=False,
)
def compare(args: argparse.Namespace, context: RunContext) -> None:
    from experiments.reports.compare import CURVES, NoRunsError
    from experiments.reports.compare import compare as compare_runs

    metrics = dict.fromkeys((*CURVES, *chosen_metrics(args.names, context)))
    try:
        print(compare_runs(context.project.outputs, args.names, metrics=tuple(metrics)))
    except NoRunsError as error:
        raise ExperimentError(str(error)) from None


def chosen_metrics(names: Sequence[str], context: RunContext) -> list[str]:
    """Return the names of the metrics in the named experiments' result tables. Shell patterns add no metrics."""
    known = [name for name in names if name in listing.names(context.project)]
    blocks = [listing.load(name, context.project)["experiment"] for name in known]
    columns = [column for block in blocks for column in columns_of(block.get("columns") or []).values()]
    return [metric for column in columns for metric in column.metrics]


@command("ui", "open the runs in MLflow", option("--port", type=int, default=5000), experiment=False, overrides=False)
def ui(args: argparse.Namespace, context: RunContext) -> None:
    """Serve MLflow's web interface for all recorded runs, in the foreground."""
    store = default_tracking_uri(context.project.outputs)
    database = Path(store.removeprefix(SQLITE))
    if store.startswith(SQLITE) and not database.is_file():
        raise ExperimentError(
            f"no runs yet: {database} does not exist; run {context.elsewhere('smoke')} first (3 minutes)"
        )
    require_free_port(args.port, context.elsewhere("ui", PORT=5001))
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    print(f"MLflow starts over {store}; its address follows", flush=True)
    words = (
        f"MLflow answers at http://127.0.0.1:{args.port} (Ctrl-C ends it)\n"
        "At the top left, 'Model training' shows runs and curves, 'GenAI' (MLflow's default) traces\n"
    )
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--port", str(args.port)]
    serve(command, "MLflow server", context, environment, lambda: answers(args.port), words)


@command("metrics", "import an experiment's missing metrics into MLflow", COMPARE)
def metrics(args: argparse.Namespace, context: RunContext) -> None:
    """Import missing metrics of the experiment's runs, and of the stages it depends on, into MLflow. Runs that MLflow
    lacks are created; a run that cannot be imported is reported and skipped.

    Raises:
        ExperimentError: the store accepts no data, or a run was left out.
    """
    import sqlite3

    from mlflow.exceptions import MlflowException

    from callbacks.tracking.metrics_file import METRICS_FILE
    from callbacks.tracking.mlflow_run import is_refusal

    outputs, uri = context.project.outputs, default_tracking_uri(context.project.outputs)
    names = [stage.name for stage in make_graph(context).plan(compare=context.compare)]
    folders = [path.parent for name in names for path in sorted((outputs / name).glob(f"*/{METRICS_FILE}"))]
    if not folders:
        raise ExperimentError(
            f"no run of '{context.target}' has a {METRICS_FILE} in {outputs}: run {context.command('train')} first"
        )
    left_out = 0
    for folder in folders:
        try:
            said = import_run(StageFolder(folder), uri, outputs)
        except (MlflowException, sqlite3.Error, OSError, yaml.YAMLError) as error:
            reason = one_line(error)[:200]
            of_folder = isinstance(error, OSError) and Path(str(error.filename)).is_relative_to(folder)
            if not (is_refusal(error) or of_folder or isinstance(error, yaml.YAMLError)):
                raise ExperimentError(
                    f"MLflow ({uri}) accepts no data: {reason}. Another process may lock it. If the database is "
                    "broken, move it away and run this command again"
                ) from None
            said, left_out = f"left out: {reason}", left_out + 1
        print(f"  {context.project.relative(folder)}: {said}", flush=True)
    if left_out:
        raise ExperimentError(f"left out {left_out} of {len(folders)} runs; the reasons are above")


def import_run(store: StageFolder, uri: str, outputs: Path) -> str:
    """Send a run's parameters, data sets and metrics to MLflow, and its trajectory pages if the run is new there.
    Return a summary."""
    from callbacks.tracking.metrics_file import METRICS_FILE, read_metrics
    from callbacks.tracking.mlflow_run import MLflowRun
    from callbacks.tracking.run_parameters import parameters
    from experiments.stages.inputs import dataset_inputs

    if store.lock.owner() is not None:
        return "left alone (a process is working in it)"
    text, result = store.config_path.read_text(), store.result()
    config, rows = yaml.safe_load(text), read_metrics(store.path / METRICS_FILE)
    given = {"experiment_name": "compact_agents", "run_name": store.path.name, "artifact_location": None, "tags": None}
    logger = config["trainer"]["logger"].get("init_args") or {}
    given |= {key: value for key, value in logger.items() if key in given}
    run = MLflowRun(**given, tracking_uri=uri, folder=store.path)
    client = run.open(rows[0].ms if rows else None)
    if run.made or result is not None:
        origin = {"commit": "unknown", "command": ""} | store.metadata() | (result or {})
        run.log_config(text, origin)
    run.log_parameters(parameters(config))
    run.log_datasets(dataset_inputs(config, outputs))
    for page in sorted((store.path / "trajectories").glob("*.html")) if run.made else ():
        run.log_file(page, "trajectories")
    sent = run.log_metrics(rows)
    if result is not None:
        client.set_terminated(run.run_id, "FINISHED", round(1000 * result["finished"]))
    elif run.made:
        client.set_terminated(run.run_id, "KILLED", rows[-1].ms if rows else None)
    return f"{sent} values sent{', to a new run' if run.made else ''}"


@command(
    "clean",
    "remove unfinished stages that cannot be resumed",
    option("--all", action="store_true", help="list finished stages, too; with --force remove them"),
    option("--force", action="store_true", help="also remove stages that can be resumed"),
    experiment=False,
    overrides=False,
)
def clean(args: argparse.Namespace, context: RunContext) -> None:
    """Remove the folders of unfinished stages that cannot be resumed. ``--force`` also removes resumable ones, and with
    ``--all`` finished ones. Stages with a running process stay."""
    removed = kept = 0
    for folder in sorted(context.project.outputs.glob("*/*/")):
        state = StageFolder(folder).state() if (folder / "stage.json").is_file() else "done"
        if state == "running":
            print(f"  left alone: {context.project.relative(folder)} (a process is working in it)")
            continue
        if state == "done" and not (args.all and (folder / "stage.json").is_file()):
            continue
        what = "can be resumed" if state != "done" and can_be_resumed(folder) else state
        if what != "unfinished" and not args.force:
            print(f"  kept    {context.project.relative(folder)} ({what})")
            kept += 1
            continue
        print(f"  removed {context.project.relative(folder)} ({what})", flush=True)
        shutil.rmtree(folder)
        removed += 1
    more = context.elsewhere("clean", **({"ALL": 1} if args.all else {}), FORCE=1)
    words = f"; {kept} kept, remove them with: {more}" if kept else ""
    print(f"{removed} stage folders removed{words}")


def can_be_resumed(folder: Path) -> bool:
    """Return whether an unfinished stage has saved weights, or, for a task, files that the next attempt can use."""
    store = StageFolder(folder)
    if store.has_weights() or not store.config_path.is_file():
        return store.has_weights()
    task = yaml.safe_load(store.config_path.read_text())["experiment"]["kind"] == "task"
    return task and any(path.name not in BOOKKEEPING for path in folder.iterdir())
