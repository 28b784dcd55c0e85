"""What the user asked for, and how a stage fails. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.launch import Launch
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
        """The make command that goes on after a failure; only training has anything to go on from."""
        return self.command(*(["RESUME=last"] if self.verb == "train" else []))

    def flags(self) -> list[str]:
        """The same as arguments of ``python -m experiments``."""
        return [self.target, *(["--seed", str(self.seed)] if self.seed is not None else []), *self.arguments]
