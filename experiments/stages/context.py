"""The user's request with its nodes, and the failure of a stage. Imports without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from common.make_command import make_command
from experiments.registry import overrides
from experiments.registry.hardware import ranks_of
from experiments.registry.project import Project
from experiments.stages.graph import Stage, closure
from experiments.stages.stop import StopSignal

DEFAULT_PORT = 29400  # torchrun's default
RESUBMIT_VARIABLE = "COMPACT_AGENTS_AGAIN"  # in a Slurm job: the command that continues in another job
STOPPED = 75  # EX_TEMPFAIL: stopped on request with a checkpoint; the same command continues


class StageFailed(Exception):
    """Raised if the process of a stage (one training run, test or task) failed. The process has printed why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Node:
    """This machine, as one of several that run the same command (``LAUNCH=torchrun``)."""

    count: int
    rank: int
    address: str  # of node 0
    port: int  # of node 0, for torchrun
    timeout_s: int  # longest wait for the other nodes


@dataclass(frozen=True, slots=True)
class Chain:
    """The position of a stage among the stages that a command runs, and how long these stages took in earlier runs."""

    number: int = 1  # of this stage, from 1
    total: int = 1
    own_s: float | None = None  # seconds of this stage in its last run, if known
    rest_s: float = 0.0  # known seconds of the later stages
    rest_known: bool = True  # whether the seconds of all later stages are known


@dataclass(frozen=True, slots=True)
class RunContext:
    """The user's command: experiment, overrides, seed and options. Results and hints quote it."""

    project: Project
    target: str
    arguments: tuple[str, ...]  # overrides as typed
    seed: int | None
    fresh: bool = False
    resume: bool = False  # requested; a stage that can be continued always is
    compare: bool = False  # make the compared experiments, too
    verb: str = "train"  # the make target
    variables: tuple[str, ...] = ()  # further make variables, as CKPT=path
    node: Node | None = None  # with LAUNCH=torchrun
    stop: StopSignal = field(default_factory=StopSignal)
    chain: Chain = Chain()  # for the screen

    @property
    def is_main_node(self) -> bool:
        """Whether this machine is node 0 (or the only node), which runs the stages; the other nodes join."""
        return self.node is None or self.node.rank == 0

    def command(self, verb: str | None = None, /, **variables: object) -> str:
        """Return the ``make`` command that the user typed, or a command with another make target for the same run."""
        given: dict[str, object] = {"EXP": self.target}
        if verb is None:
            given |= {name: value for name, _, value in (word.partition("=") for word in self.variables)}
        if self.seed is not None:
            given["SEED"] = self.seed
        if self.compare and (verb or self.verb) == "train":
            given["COMPARE"] = 1
        return make_command(verb or self.verb, given | variables, self.arguments)

    def elsewhere(self, verb: str, **variables: object) -> str:
        """Return the ``make`` command of a target that needs no experiment, such as ``ui``, with the same output
        folder."""
        return make_command(verb, variables, [word for word in self.arguments if word.startswith("--paths.outputs=")])

    def on_all_nodes(self, **variables: object) -> str:
        """Return the ``make`` command to type on every node for this run. On several nodes it has the address of node
        0, and says what the other nodes add."""
        if self.node is None or self.node.count == 1:
            return self.command(**variables)
        port = {} if self.node.port == DEFAULT_PORT else {"MASTER_PORT": self.node.port}
        count = self.node.count - 1
        others = "NODE_RANK=1 on the other node" if count == 1 else f"NODE_RANK=1 to {count} on the other nodes"
        return f"{self.command(MASTER_ADDR=self.node.address, **port, **variables)} (and with {others})"

    def for_stage(self, stage: Stage) -> RunContext:
        """Return a copy of the command's context that runs only ``stage``. It keeps the overrides of this stage and of
        the stages it depends on."""
        given, names = overrides.parse(self.arguments), {other.name for other in closure([stage])} - {stage.name}
        own = given.for_stage(stage.name, is_target=stage.name == self.target)
        kept = ("LAUNCH=", "ALLOW=") if stage.name == self.target else ("LAUNCH=",)
        variables = tuple(word for word in self.variables if word.startswith(kept))
        node = self.node and replace(self.node, count=ranks_of(stage.config).nodes)
        words = [f"--{path}={value}" for path, value in own]
        words += [f"--stages.{n}.{path}={value}" for n in given.stages if n in names for path, value in given.stages[n]]
        changed: dict[str, Any] = {"arguments": tuple(words), "variables": variables, "node": node}
        return replace(self, target=stage.name, compare=False, verb="train", **changed)

    def resume_command(self, resume: bool = True) -> str:
        """Return the ``make`` command that continues this run after a failure.

        Args:
            resume: whether something was saved to continue from.
        """
        if self.verb != "train":
            return self.command()
        if job := os.environ.get(RESUBMIT_VARIABLE):
            return job
        return self.on_all_nodes(**({"RESUME": "last"} if resume else {}))

    def flags(self) -> list[str]:
        """Return the user's command as arguments of ``python -m experiments``, without the command's name."""
        seed = ["--seed", str(self.seed)] if self.seed is not None else []
        return [self.target, *seed, *(["--compare"] if self.compare else []), *self.arguments]
