"""The processes of one stage on this node: one, or ranks that torchrun starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from callbacks.training.stop_request import STOPPED as STOPPED_FILE
from common.make_command import COMMAND_VARIABLE, CONTINUE_VARIABLE
from experiments.launch.fork_server import ForkServer
from experiments.launch.process import ChildResult, run_child
from experiments.launch.shared_retrievers import shared_retrievers
from experiments.launch.torchrun import threads_per_rank, torchrun_command
from experiments.registry.hardware import ranks_of, require_launcher
from experiments.stages.context import STOPPED, RunContext, StageFailed
from experiments.stages.graph import Stage
from experiments.stages.stage import INTERRUPTED, REFUSED, set_environment
from experiments.stages.store import StageFolder


def run_stage(
    stage: Stage,
    context: RunContext,
    watch: Callable[[], str | None] = lambda: None,
    fork_server: ForkServer | None = None,
) -> None:
    """Run this node's part of a prepared stage to its end. ``watch`` tells why it is to end early (see ``run_child``).
    ``fork_server`` is for stages of one process.

    Raises:
        StageFailed: it did not end well.
        ExperimentError: it has ranks on other nodes, which nobody starts.
    """
    ranks, node, store = ranks_of(stage.config), context.node, StageFolder(stage.folder)
    require_launcher(stage.name, stage.config, node.count if node else None)
    with context.stop.working_in(stage.folder), shared_retrievers(stage.config, ranks.processes) as shared:
        commands = {COMMAND_VARIABLE: context.command(), CONTINUE_VARIABLE: context.resume_command()}
        environment = set_environment(dict(os.environ)) | commands
        environment |= shared.environment
        command = ["-m", "experiments", "stage", str(stage.folder)]
        if ranks.several:
            command = torchrun_command(command, ranks, node)
            environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
            fork_server = None
        else:
            command = [sys.executable, *command]
        log = store.log_path if context.is_main_node else store.path / f"log-node{node.rank if node else 0}"
        child = run_child(
            command, cwd=context.project.root, env=environment, log=log, watch=lambda: watch() or shared.trouble(),
            fork_server=fork_server, chain=context.chain,
        )  # fmt: skip
    _require_success(stage, store, context, child)


def _require_success(stage: Stage, store: StageFolder, context: RunContext, child: ChildResult) -> None:
    if child.interrupted or child.returncode == INTERRUPTED:
        raise StageFailed(f"{stage.name} was stopped. To continue: {context.resume_command()}", INTERRUPTED)
    if child.returncode == REFUSED:
        raise StageFailed("", REFUSED)
    if child.returncode != 0:
        log = context.project.relative(store.log_path)
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        hint = " (killed from outside, perhaps for lack of memory)" if child.returncode == -9 else ""
        how = child.trouble or f"{how}{hint}"
        saved = store.checkpoint is not None
        again = context.resume_command(resume=saved or stage.kind == "task")  # a task may have finished parts
        verb = "continue" if saved else "try again"
        raise StageFailed(f"{stage.name} failed: {how}. Its log: {log}. To {verb}: {again}", 1)
    if context.is_main_node and (store.path / STOPPED_FILE).exists():
        raise StageFailed(
            f"{stage.name} was stopped after a checkpoint. To continue: {context.resume_command()}", STOPPED
        )
