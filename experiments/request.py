"""What the user asked for, and how a stage fails. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.launch import DEFAULT_PORT, Launch
from experiments.nodes import Crew
from experiments.project import Project
from experiments.stop import StopSignal


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
    launch: Launch | None = None  # by what ranks are started; None: Lightning, on this machine
    crew: Crew | None = None  # the other nodes
    resumed_by: str | None = None  # the command that goes on, where it is another: of a job, the one that submits it
    stop: StopSignal = field(default_factory=StopSignal)

    def command(self, *extra: str) -> str:
        """The make command that does this."""
        words = ["make", self.verb, f"EXP={self.target}", *self.variables]
        if self.seed is not None:
            words.append(f"SEED={self.seed}")
        if self.arguments:
            words.append(f'ARGS="{" ".join(self.arguments)}"')
        return " ".join([*words, *extra])

    def again(self) -> str:
        """The make command that goes on after a failure; only training has anything to go on from. On several nodes
        with the address of node 0, which may have stood in the environment, and with what the others add."""
        if self.resumed_by is not None:
            return self.resumed_by
        if self.launch is None or self.launch.nodes == 1:
            return self.command(*(["RESUME=last"] if self.verb == "train" else []))
        port = [] if self.launch.port == DEFAULT_PORT else [f"MASTER_PORT={self.launch.port}"]
        last = self.launch.nodes - 1
        others = "NODE_RANK=1 on the other node" if last == 1 else f"NODE_RANK=1 to {last} on the other nodes"
        return f"{self.command(f'MASTER_ADDR={self.launch.address}', *port, 'RESUME=last')} (and with {others})"

    def flags(self) -> list[str]:
        """The same as arguments of ``python -m experiments``."""
        return [self.target, *(["--seed", str(self.seed)] if self.seed is not None else []), *self.arguments]
