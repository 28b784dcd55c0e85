"""Runs one experiment on several nodes, which all run the same command (``LAUNCH=torchrun``).

Node 0 leads. Every node joins the torchrun launch of a stage with ranks on all nodes, and waits for the end of any
other stage. The nodes meet in the shared outputs folder: node 0 locks the folder of the stage, and the kernel releases
the lock when the process ends. A stage has failed if it is not done and its lock is free.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from callbacks.tracking.run_info import commit, duration
from callbacks.training.stop_request import STOPPED as STOPPED_FILE
from experiments.launch.shared_secret import share_secret
from experiments.launch.stage_process import run_stage
from experiments.registry.errors import ExperimentError
from experiments.registry.hardware import Ranks, ranks_of, require_counted
from experiments.stages.context import DEFAULT_PORT, STOPPED, Node, RunContext, StageFailed
from experiments.stages.graph import Stage
from experiments.stages.store import Lock, StageFolder

RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")  # set in the process of a rank alone
LAUNCHER_OPTIONS = {
    "nodes": "NNODES", "processes": "NPROC", "sbatch": "SBATCH", "node_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT",
}  # fmt: skip
POLL_S = 1.0
VISIBLE_S = 20.0  # network file systems show a new file late


# -- options ----------------------------------------------------------------------------------------------------------


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return the launcher options NNODES and NPROC as Trainer overrides (``--trainer.num_nodes=2``). Both spellings
    then give a stage the same key."""
    pairs = (("num_nodes", args.nodes), ("devices", args.processes))
    return [f"--trainer.{key}={value}" for key, value in pairs if value is not None]


def require_launchable(args: argparse.Namespace, environment: Mapping[str, str], config: Mapping[str, Any]) -> Ranks:
    """Check the launcher options, and return the experiment's numbers of nodes and processes, from its resolved
    configuration ``config``.

    Raises:
        ExperimentError: this process is a rank of torchrun already; launcher options without a launcher; options that
            contradict overrides; an unknown number of ranks.
    """
    if found := [name for name in RANK_VARIABLES if name in environment]:
        raise ExperimentError(
            f"this process is one of several ranks already ({found[0]} is set). The project starts the ranks of each "
            "stage itself, with LAUNCH=torchrun; whole commands: make help-launch"
        )
    ranks = ranks_of(config)
    if args.launch is None:
        if given := [name for option, name in LAUNCHER_OPTIONS.items() if getattr(args, option) is not None]:
            raise ExperimentError(f"{given[0]} was given without LAUNCH; add LAUNCH=torchrun (make help-launch)")
        return ranks
    for option, value, key, found in (
        ("NNODES", args.nodes, "num_nodes", ranks.nodes), ("NPROC", args.processes, "devices", ranks.processes),
    ):  # fmt: skip
        if value is not None and value != found:
            raise ExperimentError(
                f"{option}={value}, but trainer.{key} of '{config['experiment']['name']}' is {found}: leave {option} "
                "or the override away"
            )
    require_counted(f"'{config['experiment']['name']}'", config)
    return ranks


def this_node(args: argparse.Namespace, environment: Mapping[str, str], count: int) -> Node:
    """Return this machine's node rank and the address of node 0, from the options or torchrun's usual variables.

    Args:
        count: number of nodes.

    Raises:
        ExperimentError: a variable that is not a number, a node rank outside 0..count-1, no address of node 0.
    """

    def number(name: str, given: int | None, default: int) -> int:
        text = environment.get(name) or str(default)
        if given is None and not text.isdigit():
            raise ExperimentError(f"{name} is '{text}'; expected a number")
        return int(text) if given is None else given

    rank = number("NODE_RANK", args.node_rank, 0)
    port, timeout = number("MASTER_PORT", args.master_port, DEFAULT_PORT), number("LAUNCH_TIMEOUT", None, 600)
    address = args.master_addr or environment.get("MASTER_ADDR") or ("127.0.0.1" if count == 1 else None)
    if not 0 <= rank < count:
        raise ExperimentError(f"NODE_RANK is {rank}, but there are {count} nodes: expected 0 to {count - 1}")
    if address is None:
        raise ExperimentError(
            f"LAUNCH=torchrun with {count} nodes needs the address of node 0: MASTER_ADDR=host (and, on the others, "
            "NODE_RANK=1, 2, ...), the same MASTER_PORT everywhere; whole commands: make help-launch"
        )
    return Node(count, rank, address, port, timeout)


# -- node 0 -----------------------------------------------------------------------------------------------------------


def watch_nodes(store: StageFolder, nodes: int) -> Callable[[], str | None]:
    """Return a function that reports a failed node to node 0. It returns a message about a node that joined the stage
    and died, or None if all are alive."""
    begun: dict[int, dict[str, Any]] = {}

    def failure() -> str | None:
        for rank in range(1, nodes):
            owner = _node_lock(store, rank).owner()
            if owner is not None:
                begun[rank] = owner
            elif rank in begun:
                return f"node {rank} ({begun[rank]['host']}) has failed, or is gone: see log-node{rank}"
        return None

    return failure


def _node_lock(store: StageFolder, rank: int) -> Lock:
    return Lock(store.path.with_name(f"{store.path.name}.node{rank}.lock"))


# -- the other nodes --------------------------------------------------------------------------------------------------


def run_other_node(plan: Sequence[Stage], context: RunContext, fresh: Stage | None) -> None:
    """Run this node's ranks of the stages that have ranks on all nodes. For nodes other than node 0.

    Raises:
        ExperimentError: node 0 cannot be found, or runs other code.
        StageFailed: a stage failed, here or on node 0.
    """
    assert context.node is not None
    share_secret(context.project.outputs)
    for number, stage in enumerate(plan, 1):
        store = StageFolder(stage.folder)
        if store.result() is not None and stage is not fresh:
            continue
        print(f"\n[{number}/{len(plan)}] {stage.name}: waiting for node 0", flush=True)
        if not _wait_until_begun(stage, store, context, stage is fresh):
            print(f"  node 0 has made {stage.name}", flush=True)
            continue
        if ranks_of(stage.config).nodes == 1:
            print(f"  node 0 makes {stage.name}", flush=True)
            _wait_until_made(stage, store, context)
            continue
        print(f"  {stage.name}: node {context.node.rank} of {context.node.count}", flush=True)
        with _node_lock(store, context.node.rank).held():
            run_stage(stage, context, functools.partial(_node_0_gone, stage))
            _wait_until_made(stage, store, context)


def _wait_until_begun(stage: Stage, store: StageFolder, context: RunContext, fresh: bool) -> bool:
    """Wait until node 0 has prepared the stage's folder, and return True. Return False if the stage is done instead."""
    assert context.node is not None
    deadline = time.monotonic() + context.node.timeout_s
    while time.monotonic() < deadline:
        if store.result() is not None and not fresh:
            return False
        owner = store.lock.owner()
        if owner is not None and owner.get("prepared"):
            if owner["commit"] != (here := commit()):
                there = owner["commit"][:9]
                raise ExperimentError(f"this node runs commit {here[:9]}, node 0 {there}; use one commit on all nodes")
            return True
        time.sleep(POLL_S / 2)
    raise ExperimentError(
        f"node 0 has not begun {stage.name} within {duration(context.node.timeout_s)} (LAUNCH_TIMEOUT, in seconds): is "
        "the command running there (NODE_RANK=0), and do all nodes share the folder of the outputs "
        f"({context.project.outputs}, COMPACT_AGENTS_OUTPUTS), under one path?"
    )


def _wait_until_made(stage: Stage, store: StageFolder, context: RunContext) -> None:
    """Wait until node 0 has finished the stage. Raises StageFailed if node 0 has stopped without a result."""
    with context.stop.working_in(stage.folder):
        while store.lock.owner() is not None:
            time.sleep(POLL_S / 2)
    stopped, deadline = store.path / STOPPED_FILE, time.monotonic() + VISIBLE_S
    while store.result() is None and not stopped.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)
    if store.result() is None:
        if stopped.exists():
            raise StageFailed(f"{stage.name} was stopped after a checkpoint", STOPPED)
        raise StageFailed(_node_0_gone(stage) or f"{stage.name} has failed", 1)


def _node_0_gone(stage: Stage) -> str | None:
    store = StageFolder(stage.folder)
    if store.lock.owner() is not None or store.result() is not None or (store.path / STOPPED_FILE).exists():
        return None
    return f"node 0 has stopped before {stage.name} was done; its output says why"
