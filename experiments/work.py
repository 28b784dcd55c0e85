"""The processes of one stage: here alone, several ranks here, or ranks on several nodes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from callbacks.stop_request import STOPPED as STOPPED_FILE
from experiments.errors import ExperimentError
from experiments.graph import Stage
from experiments.launch import (
    STOPPED,
    Launch,
    Ranks,
    agent_command,
    rank_environment,
    ranks_of,
    require_launcher,
)
from experiments.nodes import VISIBLE_S, Connection, NodeLost, free_port, join
from experiments.process import ChildResult, run_child
from experiments.request import Request, StageFailed
from experiments.services import shared_retrievers
from experiments.stage import INTERRUPTED, REFUSED, set_environment
from experiments.store import StageFolder


def run_stage(stage: Stage, store: StageFolder, request: Request, resume: bool) -> None:
    """Run a prepared stage to its end, on this machine or on all nodes.

    Raises:
        StageFailed: it did not end well, here or on another node.
        ExperimentError: it has ranks on other nodes, which nobody starts.
    """
    require_launcher(stage.name, stage.config, request.launch)
    launch, ranks = request.launch, ranks_of(stage.config) if stage.kind != "task" else Ranks(1, 1)
    crew = request.crew if ranks.nodes > 1 else None

    def watch() -> str | None:
        trouble = crew.trouble() if crew else None
        if crew and crew.stop_asked and not request.stop.received:
            request.stop.receive()
        return trouble

    try:
        with request.stop.working_in(stage.folder), shared_retrievers(stage.config, ranks.processes) as shared:
            environment = _environment(request) | shared
            command = [sys.executable, "-m", "experiments", "stage", str(stage.folder)]
            command += ["--resume"] if resume else []
            if launch is not None and ranks.several:
                port = crew.begin(stage.folder, resume) if crew else free_port()
                address = launch.address if crew else "127.0.0.1"
                command = agent_command(stage.folder, resume, ranks, 0, address, port)
                environment = rank_environment(environment, ranks.processes or 1)
            child = _run(command, environment, store.log_path, request, watch)
            if crew and child.returncode == 0:
                crew.finish()
    except NodeLost as error:
        child = ChildResult(1, False, str(error))
    _require_success(stage, store, request, resume, child)


def _environment(request: Request) -> dict[str, str]:
    environment = set_environment(dict(os.environ)) | {"COMPACT_AGENTS_COMMAND": request.command()}
    environment["COLUMNS"] = str(shutil.get_terminal_size((120, 24)).columns)
    return environment


def _run(
    command: list[str], environment: dict[str, str], log: Path, request: Request, watch: Callable[[], str | None]
) -> ChildResult:
    def on_interrupt(presses: int) -> None:
        if presses == 1:
            print("\nstopping cleanly; Ctrl-C again ends it at once", flush=True)
        else:
            print("\nended at once", flush=True)

    root = request.project.root
    return run_child(command, cwd=root, env=environment, log=log, on_interrupt=on_interrupt, watch=watch)


def _require_success(stage: Stage, store: StageFolder, request: Request, resume: bool, child: ChildResult) -> None:
    if child.interrupted or child.returncode == INTERRUPTED:
        raise StageFailed(f"{stage.name} was stopped. To continue: {request.again()}", INTERRUPTED)
    if child.returncode == REFUSED:
        if not resume:
            shutil.rmtree(stage.folder)
        raise StageFailed("", REFUSED)
    if child.trouble or child.returncode != 0:
        log = request.project.relative(store.log_path)
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        how = child.trouble or how
        hint = " (killed from outside, perhaps for lack of memory)" if child.returncode == -9 else ""
        again = "continue" if store.checkpoint.exists() else "try again"
        raise StageFailed(f"{stage.name} failed: {how}{hint}. Its log: {log}. To {again}: {request.again()}", 1)
    if (store.path / STOPPED_FILE).exists():
        raise StageFailed(f"{stage.name} was stopped after a checkpoint. To continue: {request.again()}", STOPPED)


# -- on the other nodes ---------------------------------------------------------------------------------------------


def help_out(launch: Launch, request: Request) -> None:
    """What a node other than the first does: its part of every stage that runs on all nodes, until node 0 is done.

    Raises:
        ExperimentError: node 0 cannot be found, or does not take this node.
        StageFailed: node 0 did not end well, or is gone.
    """
    leader = join(launch, request.project)
    print(f"node {launch.node_rank} works for node 0 at {launch.address}:{launch.port}", flush=True)
    request.stop.install(then=lambda: leader.send(stop=True))
    try:
        while True:
            message = leader.receive(None) or {}
            if "say" in message:
                print(message["say"], flush=True)
            elif "run" in message:
                path, resume, port = (message[name] for name in ("run", "resume", "port"))
                leader.send(ended=_help_with(path, resume, port, launch, request, leader))
            elif "done" in message:
                break
    except NodeLost as error:
        raise StageFailed(f"node 0 has gone ({error}); its own output says why", 1) from None
    finally:
        leader.close()
    if message["done"] != 0:
        raise StageFailed(f"node 0 ended with exit code {message['done']}; its own output says why", message["done"])


def _help_with(path: str, resume: bool, port: int, launch: Launch, request: Request, leader: Connection) -> int:
    """This node's ranks of the stage in the folder ``path``; returns their exit code."""
    folder = request.project.outputs / path
    if ".." in folder.parts or Path(path).is_absolute():
        raise ExperimentError(f"node 0 names '{path}', which is no folder under the outputs")
    _wait_for(StageFolder(folder).config_path)
    ranks = ranks_of(config := yaml.safe_load(StageFolder(folder).config_path.read_text()))
    print(f"\n{config['experiment']['name']}: node {launch.node_rank} of {launch.nodes}", flush=True)

    def watch() -> str | None:
        try:
            message = leader.receive(0)
        except NodeLost as error:
            return f"node 0 has gone ({error})"
        return f"node 0 ended with exit code {message['done']}" if message and "done" in message else None

    with shared_retrievers(config, ranks.processes) as shared:
        environment = rank_environment(_environment(request) | shared, ranks.processes or 1)
        command = agent_command(folder, resume, ranks, launch.node_rank, launch.address, port)
        child = _run(command, environment, folder / f"log-node{launch.node_rank}", request, watch)
    if child.trouble:
        raise NodeLost(child.trouble)
    return INTERRUPTED if child.interrupted else child.returncode


def _wait_for(path: Path) -> None:
    """A network file system may show late what another node has written."""
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise ExperimentError(f"{path} has not appeared within {VISIBLE_S:.0f} s, although node 0 has written it")
        time.sleep(0.2)
