"""How many ranks a stage has, and by what they are started.

Without a launcher Lightning starts the ranks of one machine by itself. With ``LAUNCH=torchrun`` every node runs the
same make command: node 0 makes the stages, the others help with those that run on several nodes (``nodes.py``); each
node's ranks are started by torchrun (``agent.py``). ``LAUNCH=slurm`` (``slurm.py``) writes a job in which every node
does exactly that.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError

DEFAULT_PORT = 29400  # torchrun's own default for a rendezvous
DEFAULT_TIMEOUT_S = 600.0
STOPPED = 75  # EX_TEMPFAIL: stopped on request with a checkpoint; the same command goes on
FOREIGN = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")  # what only the process of a rank has
# By these Lightning takes a process for a task of srun, one per rank. The tasks of our jobs are nodes.
SRUN_VARIABLES = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True, slots=True)
class Ranks:
    """``processes`` on each of ``nodes`` machines; ``processes`` is None where the configuration leaves it open
    (``devices: auto``)."""

    nodes: int
    processes: int | None

    @property
    def several(self) -> bool:
        return self.nodes > 1 or (self.processes or 1) > 1


def ranks_of(config: Mapping[str, Any]) -> Ranks:
    """Of a stage's resolved configuration. A task has one process."""
    trainer = config.get("trainer") or {}
    return Ranks(int(trainer.get("num_nodes") or 1), count_devices(trainer.get("devices", 1)))


def count_devices(devices: Any) -> int | None:
    """As ``Trainer(devices=...)`` understands it: a number, a list of indices, either as text, or ``auto`` (None)."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    try:
        number = int(devices)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


@dataclass(frozen=True, slots=True)
class Launch:
    """This node's place among those that make a stage together."""

    nodes: int
    node_rank: int
    address: str  # of node 0
    port: int  # of node 0, where the others report
    timeout_s: float  # for the nodes to find one another

    @property
    def leads(self) -> bool:
        return self.node_rank == 0


def from_arguments(args: argparse.Namespace, environment: Mapping[str, str], nodes: int) -> Launch:
    """This node's place among ``nodes``: options first, then torchrun's usual variables.

    Raises:
        ExperimentError: a number that is none, a node rank outside 0..nodes-1, no address of node 0.
    """
    rank = _number("NODE_RANK", args.node_rank, environment, 0)
    port = _number("MASTER_PORT", args.master_port, environment, DEFAULT_PORT)
    timeout = _number("LAUNCH_TIMEOUT", None, environment, int(DEFAULT_TIMEOUT_S))
    address = args.master_addr or environment.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else None)
    if not 0 <= rank < nodes:
        raise ExperimentError(f"NODE_RANK is {rank}, but there are {nodes} nodes: expected 0 to {nodes - 1}")
    if address is None:
        raise ExperimentError(
            f"LAUNCH=torchrun with {nodes} nodes needs the address of node 0: MASTER_ADDR=host (and, on the others, "
            "NODE_RANK=1, 2, ...), the same MASTER_PORT everywhere"
        )
    return Launch(nodes, rank, address, port, float(timeout))


def _number(name: str, given: int | None, environment: Mapping[str, str], default: int) -> int:
    if given is not None:
        return given
    text = environment.get(name) or str(default)
    if not text.isdigit():
        raise ExperimentError(f"{name} is '{text}'; expected a number")
    return int(text)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """NNODES and NPROC are short for two overrides of the trainer, so that the experiment is the same (and has the
    same key) whichever way it was asked for."""
    words = []
    if args.nodes is not None:
        words.append(f"--trainer.num_nodes={args.nodes}")
    if args.processes is not None:
        words.append(f"--trainer.devices={args.processes}")
    return words


def require_ranks(config: Mapping[str, Any], args: argparse.Namespace) -> Ranks:
    """The ranks of the experiment that a launcher is asked to start.

    Raises:
        ExperimentError: the options say one thing and the overrides another, or the number of processes is open.
    """
    name, ranks = config["experiment"]["name"], ranks_of(config)
    for option, value, key, found in (
        ("NNODES", args.nodes, "num_nodes", ranks.nodes), ("NPROC", args.processes, "devices", ranks.processes),
    ):  # fmt: skip
        if value is not None and value != found:
            raise ExperimentError(
                f"{option}={value}, but trainer.{key} of '{name}' is {found}: leave {option} or the override away"
            )
    require_counted(f"'{name}'", config)
    return ranks


def require_counted(where: str, config: Mapping[str, Any]) -> None:
    """Raises ExperimentError where the number of processes is left to each node (``devices: auto`` or -1): torchrun
    must be told, and a rank of Lightning's counts the ranks of all nodes by its own node's devices."""
    if ranks_of(config).processes is None:
        devices = (config.get("trainer") or {}).get("devices")
        raise ExperimentError(
            f"{where}: trainer.devices is {devices!r}, but a launcher must know how many processes each node gets: "
            "NPROC=8, or --trainer.devices 8 (of a stage under it: --stages.NAME.trainer.devices 8)"
        )


def require_no_options(args: argparse.Namespace) -> None:
    """Raises ExperimentError for what only a launcher reads."""
    given = {"NNODES": args.nodes, "NPROC": args.processes, "NODE_RANK": args.node_rank}
    given |= {"MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port, "SBATCH": args.sbatch}
    if found := [name for name, value in given.items() if value is not None]:
        raise ExperimentError(f"{', '.join(found)} was given, but nothing to launch by: add LAUNCH=torchrun or slurm")


def require_launcher(name: str, config: Mapping[str, Any], launch: Launch | None) -> None:
    """Raises ExperimentError for a stage on several nodes whose ranks nobody starts, or could: those here would wait
    for ever."""
    nodes = ranks_of(config).nodes
    if nodes > 1:
        require_counted(f"'{name}'", config)
    if nodes > 1 and (launch is None or launch.nodes != nodes):
        here = "nothing starts the ranks of the others" if launch is None else f"{launch.nodes} are launched"
        raise ExperimentError(
            f"'{name}': trainer.num_nodes is {nodes}, but {here}. Give LAUNCH=torchrun NNODES={nodes} MASTER_ADDR=host "
            f"NODE_RANK=0, 1, ... on every node, or LAUNCH=slurm; or leave --trainer.num_nodes away"
        )


def require_no_rank(environment: Mapping[str, str]) -> None:
    """Raises ExperimentError in a process that torchrun has started: its ranks would wait for one another's stages."""
    if found := [name for name in FOREIGN if name in environment]:
        raise ExperimentError(
            f"this process is one of several ranks already ({found[0]} is set). The project starts the ranks of each "
            "stage itself: run make train once per node, with LAUNCH=torchrun"
        )


def agent_command(folder: Path, resume: bool, ranks: Ranks, node_rank: int, address: str, port: int) -> list[str]:
    """Starts this node's ranks of a stage; see ``agent.py``."""
    stage = ["-m", "experiments", "stage", str(folder), *(["--resume"] if resume else [])]
    return [
        sys.executable, "-m", "experiments.agent", f"--nnodes={ranks.nodes}", f"--nproc-per-node={ranks.processes}",
        f"--node-rank={node_rank}", f"--master-addr={address}", f"--master-port={port}", "--max-restarts=0", *stage,
    ]  # fmt: skip


def rank_environment(environment: Mapping[str, str], processes: int) -> dict[str, str]:
    """Threads for the ranks of one node: they share the cores, as under Lightning's own launcher."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {"OMP_NUM_THREADS": str(threads), **environment}
