"""Runs each stage of an experiment once, in its own process."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from callbacks.tracking.run_info import commit, duration
from callbacks.training.checkpoint_files import settle_checkpoints
from common.digests import DigestError, check_digests
from data_modules.datasets.benchmark_names import split_reference
from experiments.launch import retriever_identity
from experiments.launch.fork_server import ForkServer
from experiments.launch.nodes import run_other_node, watch_nodes
from experiments.launch.shared_secret import share_secret
from experiments.launch.stage_process import run_stage
from experiments.registry.errors import ExperimentError
from experiments.registry.files import differences
from experiments.registry.hardware import ranks_of, require_launcher
from experiments.stages.context import STOPPED, Chain, RunContext, StageFailed
from experiments.stages.graph import Graph, Stage, closure, require_files, strings
from experiments.stages.stage import REFUSED, SUMMARY
from experiments.stages.store import StageFolder
from experiments.stages.tested_on import tested_on

SHOWN = 3  # runs, and differing options of a run, that a message names
WATCHES = ("trainer.logger.", "trainer.default_root_dir")  # derived from the name, the seed and the folder
RECORDED_VERSIONS = ("torch", "lightning", "transformers", "deepspeed", "vllm", "pyserini")


def make(graph: Graph, context: RunContext, *, without_target: bool = False) -> tuple[Stage, list[Stage]]:
    """Run all unfinished stages of an experiment: its dependencies, itself, and compared experiments if the context
    says so.

    Args:
        without_target: run the dependencies alone.

    Returns:
        the stage of the experiment, and the compared stages that are done.

    Raises:
        ExperimentError: the user has to fix something first; nothing has run.
        StageFailed: a stage failed.
    """
    target = graph.target()
    plan = closure(target.upstream) if without_target else graph.plan(compare=context.compare)
    todo = to_make(plan, fresh=(fresh := target if context.fresh and not without_target else None))
    print_plan(graph, todo, context, plan)
    if not context.is_main_node:
        run_other_node(plan, context, fresh)
    elif todo:
        require_writable(context.project.outputs)
        if context.resume and not any(_was_begun(s) for s in todo if not (context.fresh and s is target)):
            print("  RESUME=last: no stage was interrupted; starting from the beginning")
        for stage in todo:
            require_launcher(stage.name, stage.config, context.node.count if context.node else None)
        require_needs(todo)
        require_files(todo, context.project.root)
        fork_server = None
        if len(todo) > 1:  # a single stage checks itself before it loads anything
            fork_server = ForkServer()
            require_valid(context, fork_server)
        started = time.monotonic()
        times = [last_seconds(stage) for stage in todo]
        for number, stage in enumerate(todo, 1):
            print(f"\n[{number}/{len(todo)}] {stage.name}: {stage.config['experiment'].get('summary', '')}", flush=True)
            if context.stop.received:
                raise StageFailed(f"stopped before {stage.name}. To continue: {context.resume_command()}", STOPPED)
            rest = times[number:]
            chain = Chain(number, len(todo), times[number - 1], sum(s for s in rest if s is not None), None not in rest)
            ours = dataclasses.replace(context, chain=chain)
            make_stage(stage, ours, fresh=context.fresh and stage is target, fork_server=fork_server)
        print(f"\n{_stages(len(todo))} made in {duration(time.monotonic() - started)}.")
    return target, [s for s in graph.compared(target) if StageFolder(s.folder).result() is not None]


def last_seconds(stage: Stage) -> float | None:
    """Return how many seconds the stage took in its last run, with any settings and seed. Returns None without a run in
    these outputs."""
    results = [StageFolder(folder).result() for folder in stage.folder.parent.glob("*/")]
    done = [result for result in results if result is not None and result["kind"] == stage.kind]
    return max(done, key=lambda result: result["finished"])["seconds"] if done else None


def to_make(stages: Sequence[Stage], fresh: Stage | None = None) -> list[Stage]:
    """Return the stages that are not done, and the stage ``fresh``, which runs again."""
    return [s for s in stages if StageFolder(s.folder).result() is None or s is fresh]


def _was_begun(stage: Stage) -> bool:
    """Return whether an earlier run of the stage left something to continue from: a checkpoint, or finished parts of a
    task."""
    state = StageFolder(stage.folder).state()
    return state in ("interrupted", "running") or (state == "unfinished" and stage.kind == "task")


def print_plan(graph: Graph, todo: Sequence[Stage], context: RunContext, plan: Sequence[Stage] | None = None) -> None:
    """Print the plan of a command: which stages are done, which will run, and which are left out."""
    plan = graph.plan(compare=context.compare) if plan is None else plan
    print(f"{context.target}: {_stages(len(plan))}, {len(plan) - len(todo)} done, {len(todo)} to make")
    print(f"  in {context.project.relative(context.project.outputs)}/NAME/KEY:")
    width = max(len(s.name) for s in plan)
    for stage in plan:
        folder = StageFolder(stage.folder)
        what = {"missing": "to make", "unfinished": "to make", "interrupted": "to continue"}.get(folder.state(), "")
        if stage not in todo:
            result = folder.result() or {}
            what = f"done in {duration(result.get('seconds', 0))}"
            if replaced := folder.replaced_upstream(stage.upstream):
                what += f", with an earlier {' and '.join(replaced)}; again: {_afresh(stage, context)}"
        elif folder.result() is not None:
            what = "to make afresh"
        elif folder.lock.owner() is not None:
            what = "being made by another process"
        print(f"  {stage.name:<{width}}  {stage.kind:<4}  {stage.key}  {what}")
    if chosen := graph.target().chosen:
        options = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in chosen.items()
        )
        print(f"  follows from the machine: {options}")
    if left_out := [s.name for s in to_make(graph.compared(graph.target())) if s not in plan]:
        also = context.for_stage(graph.target()).on_all_nodes(COMPARE=1)
        print(f"  compared experiments that are left out: {', '.join(left_out)}; to make them, too: {also}")
    sys.stdout.flush()


def other_runs(stage: Stage) -> list[StageFolder]:
    """Return the folders of the same experiment's runs with other settings or another seed, newest first."""
    folders = [f for f in stage.folder.parent.glob("*/") if f != stage.folder and (f / "stage.json").is_file()]
    return [StageFolder(f) for f in sorted(folders, key=lambda f: (f / "stage.json").stat().st_mtime, reverse=True)]


def describe_run(run: StageFolder, stage: Stage) -> str:
    """Return a run in words: its key, its state, and its options that differ from those of ``stage``."""
    config = yaml.safe_load(run.config_path.read_text())
    found = [(key, there) for key, _, there in differences(stage.config, config) if not key.startswith(WATCHES)]
    found += [("argument", text) for text in run.metadata().get("arguments", ()) if text not in stage.arguments]
    shown = [f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in found[:SHOWN]]
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return f"{run.path.name} ({run.state()}: {', '.join([*shown, *more]) or 'other input files'})"


def runs_there(stage: Stage) -> str:
    """Return one line about the other runs of a stage's experiment."""
    runs = other_runs(stage)
    if not runs:
        return "it has no other run"
    shown = [describe_run(run, stage) for run in runs[:SHOWN]]
    return f"{len(runs)} other{'s are' if len(runs) > 1 else ' is'} there: {'; '.join(shown)}" + (
        f"; {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    )


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"


def require_writable(outputs: Path) -> None:
    """Create the output folder. Raises ExperimentError if it cannot be written to."""
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=outputs):
            pass
    except OSError as error:
        raise ExperimentError(
            f"cannot write outputs to {outputs} ({error.strerror}); choose another folder with "
            "--paths.outputs folder, or COMPACT_AGENTS_OUTPUTS=folder in the environment"
        ) from None


def require_needs(stages: Sequence[Stage]) -> None:
    """Raise ExperimentError that lists every missing file or folder that the user has to provide."""
    missing = {need.path: need for stage in stages for need in stage.needs if not need.present}
    if missing:
        lines = [f"  needs: {need.path} ({need.how})" for need in missing.values()]
        raise ExperimentError("\n".join(["some inputs are missing:", *lines]))


def require_valid(context: RunContext, fork_server: ForkServer, *, elsewhere: bool = False) -> None:
    """Validate all stages before the first one runs. A child process does this, so that this process does not import
    torch.

    Args:
        elsewhere: the stages will run on another machine, so that the devices of this machine do not matter.
    """
    flags = [*(["--fresh"] if context.fresh else []), *(["--elsewhere"] if elsewhere else [])]
    command = [sys.executable, "-m", "experiments", "validate", *context.flags(), *flags]
    code = fork_server.start(command, cwd=context.project.root, env=dict(os.environ), outputs=(1, 2)).wait()
    if code != 0:
        raise StageFailed("", code)


def require_unaltered(path: Path, again: str = "") -> None:
    """Raise ExperimentError if a model folder or a table differs from its digests (stored SHA-256). Passes without
    digests.

    Args:
        again: end of the message: the command that makes the file again.
    """
    try:
        check_digests(path)
    except DigestError as error:
        raise ExperimentError(f"{error}{again}") from None


def require_inputs(stage: Stage, context: RunContext) -> None:
    """Raise ExperimentError if a file or folder that the stage reads differs from its digests (stored SHA-256)."""
    root = context.project.root
    found = (strings(stage.config.get(section)) for section in ("model", "data", "task"))
    named = {(root / split_reference(text)[1]).absolute() for texts in found for _, text in texts if text}
    made = {other.folder.absolute(): other for other in closure(stage.upstream)}
    for path in sorted(path for path in named if os.path.exists(path)):
        if not path.is_relative_to(stage.folder.absolute()):
            maker = next((other for folder, other in made.items() if path.is_relative_to(folder)), None)
            require_unaltered(path, f" (again: {_afresh(maker, context)})" if maker else "")


def _afresh(stage: Stage, context: RunContext) -> str:
    """Return the ``make`` command that runs a stage from the beginning."""
    return context.for_stage(stage).on_all_nodes(FRESH=1)


def _settle(stage: Stage, context: RunContext) -> None:
    """Check the stage's checkpoints, and print which ones are damaged. Raises ExperimentError if no checkpoint can be
    used."""
    try:
        for line in settle_checkpoints(stage.folder):
            print(f"  {line}", flush=True)
    except DigestError as error:
        raise ExperimentError(f"{stage.name}: {error}: {_afresh(stage, context)}") from None


def make_stage(
    stage: Stage,
    context: RunContext,
    *,
    fresh: bool,
    checkpoint: Path | None = None,
    fork_server: ForkServer | None = None,
) -> None:
    """Run one stage unless it is done, and lock its folder meanwhile.

    Args:
        checkpoint: a .ckpt that a stage of kind test loads first.

    Raises:
        StageFailed: the stage failed.
    """
    store = StageFolder(stage.folder)
    share_secret(context.project.outputs)

    def waiting(owner: dict[str, Any]) -> None:
        print(f"  {stage.name} is being made by process {owner['pid']}; waiting for it (Ctrl-C to stop waiting)")

    with store.lock.held(waiting):
        if store.result() is not None and not fresh:
            print(f"  {stage.name} has been made meanwhile")
            return
        require_inputs(stage, context)
        if stage.kind == "fit" and not fresh:
            _settle(stage, context)
        resume = not fresh and stage.kind == "fit" and store.checkpoint
        if resume:
            print(f"  continuing from {context.project.relative(resume)}", flush=True)
            print(f"  from the beginning instead: {_afresh(stage, context)}", flush=True)
        metadata = {
            "name": stage.name,
            "key": stage.key,
            "arguments": list(stage.arguments),
            "upstream": {s.name: s.key for s in stage.upstream},
            "identities": {s.name: StageFolder(s.folder).identity() for s in stage.upstream},
            "command": context.command(),
            "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
        }
        # A task may continue from the files of an earlier attempt at the same configuration.
        keep = bool(resume) or (stage.kind == "task" and not fresh and store.path.exists())
        serve = context.for_stage(stage).command("retriever")
        if keep and (replaced := store.replaced_upstream(stage.upstream)):
            print(f"  it began with an earlier {' and '.join(replaced)}, made again since", flush=True)
            if not resume:  # told above
                print(f"  from the beginning instead: {_afresh(stage, context)}", flush=True)
        metadata["retrievers"] = retriever_identity.describe(stage.config, stage.name, serve)
        for other in closure([stage]) if keep else closure(stage.upstream):
            earlier = StageFolder(other.folder).metadata().get("retrievers") or {}
            again = _afresh(other, context)
            retriever_identity.require_same(other.name, earlier, metadata["retrievers"], again)
        if earlier := store.prepare(stage, metadata, keep=keep):
            print(f"  earlier weights stay in {context.project.relative(earlier)} until the stage is done", flush=True)
        store.lock.update(prepared=True, commit=commit())
        try:
            try:
                run_stage(stage, context, watch_nodes(store, ranks_of(stage.config).nodes), fork_server)
            finally:
                seconds = store.end_session() if store.metadata() else 0.0
        except StageFailed as failure:
            _require_folder(stage, store, context)
            if failure.exit_code == REFUSED and not keep:
                store.undo_prepare(earlier)
            raise
        _require_folder(stage, store, context)
        store.finish(_result(stage, store, context, seconds))


def _require_folder(stage: Stage, store: StageFolder, context: RunContext) -> None:
    if not store.config_path.exists():
        raise StageFailed(
            f"{context.project.relative(store.path)} was deleted while {stage.name} was being made in it. To try "
            f"again: {context.resume_command(resume=False)}", 1,
        )  # fmt: skip


def _result(stage: Stage, store: StageFolder, context: RunContext, seconds: float) -> dict[str, Any]:
    evaluation, summary = store.evaluation, stage.folder / SUMMARY
    sessions = store.metadata()["sessions"]
    return {
        "name": stage.name,
        "key": stage.key,
        "kind": stage.kind,
        "seed": stage.config["seed_everything"],
        "seconds": round(seconds, 1),
        "sessions": len(sessions),
        "started": sessions[0]["started"],
        "finished": sessions[-1]["ended"],
        "commit": commit(),
        "command": context.command(),
        "upstream": {s.name: s.key for s in stage.upstream},
        "retrievers": store.metadata()["retrievers"],
        "host": {"machine": platform.platform(), "cores": os.cpu_count()},
        "versions": _versions(),
        "tested_on": tested_on(stage.folder),
        "test": json.loads(evaluation.read_text()).get("test") if evaluation.is_file() else None,
        "summary": json.loads(summary.read_text()) if summary.is_file() else None,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in RECORDED_VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not in this environment
    return versions


def folder_of(context: RunContext, stage: Stage) -> Path:
    """Return the folder of a finished stage. Raises ExperimentError for an unfinished one, with the command that runs
    it and the other runs of its experiment."""
    if StageFolder(stage.folder).result() is None:
        seed = stage.config["seed_everything"]
        raise ExperimentError(
            f"'{stage.name}' with this configuration (key {stage.key}, seed {seed}) has not been made yet; "
            f"{runs_there(stage)}: run {context.for_stage(stage).on_all_nodes()} first"
        )
    return stage.folder
