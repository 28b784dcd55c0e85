"""Registers commands, and holds helpers that several commands share. Imports without torch."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import http.client
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from experiments.launch.stage_process import handling
from experiments.registry import overrides as cli_overrides
from experiments.registry.errors import ExperimentError
from experiments.stages.context import RunContext, StageFailed
from experiments.stages.graph import Graph, Need, Stage

SERVER_GRACE_S = 10.0  # before a server is killed
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends

Run = Callable[[argparse.Namespace, RunContext], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Command:
    """A registered command of ``python -m experiments``: its name, help, options and function."""

    name: str
    help: str
    run: Run
    options: tuple[Option, ...]
    experiment: bool
    overrides: bool


COMMANDS: dict[str, Command] = {}


def option(*flags: str, **settings: Any) -> Option:
    """Describe a command-line option by the arguments of ``ArgumentParser.add_argument``."""
    return flags, settings


def command(
    name: str, help: str, *options: Option, experiment: bool = True, overrides: bool = True
) -> Callable[[Run], Run]:
    """Decorator that registers a function as a command of ``python -m experiments``. The function prints, raises
    ExperimentError for the user's mistakes, and imports heavy packages in its body.

    Args:
        options: further options.
        experiment: the command takes an experiment's name and ``--seed``.
        overrides: the command takes overrides of the configuration (``--model.x 1``).
    """

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(name, help, run, options, experiment, overrides)
        return run

    return register


COMPARE = option("--compare", action="store_true", help="also the experiments that it is compared with")


def named(context: RunContext, verb: str | None = None, **variables: object) -> RunContext:
    """Return the run's context with make variables added, so that hints can print the complete command. ``verb``
    replaces the command's name."""
    given = tuple(f"{name}={value}" for name, value in variables.items() if value)
    return dataclasses.replace(context, verb=verb or context.verb, variables=given)


def make_graph(context: RunContext) -> Graph:
    return Graph(context.project, context.target, cli_overrides.parse(context.arguments), context.seed)


def unique_needs(stages: Sequence[Stage]) -> list[Need]:
    return list({need.path: need for stage in stages for need in stage.needs}.values())


def numbers(option: str, text: str, example: str, least: int = 0) -> list[int]:
    """Parse the comma-separated numbers of an option. Raises ExperimentError for other words and for numbers below
    ``least``."""
    if not all(part.strip().isdigit() and int(part) >= least for part in text.split(",")):
        raise ExperimentError(f"{option} {text}: expected numbers separated by commas, as in {example}")
    return [int(part) for part in text.split(",")]


def require_free_port(port: int, otherwise: str) -> None:
    """Raise ExperimentError if a port is invalid or in use. ``otherwise``: a command with another port, for the
    message."""
    if not 0 <= port < 1 << 16:
        raise ExperimentError(f"port {port}: expected a number from 0 to 65535, as in {otherwise}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ExperimentError(f"port {port} is in use ({error.strerror}); choose another: {otherwise}") from None


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server on this machine answers HTTP on the port. ``host``: what it listens on."""
    address = "127.0.0.1" if host in ("", "0.0.0.0") else host
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=1)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False


def serve(
    command: Sequence[str],
    name: str,
    context: RunContext,
    environment: Mapping[str, str] | None = None,
    ready: Callable[[], bool] = lambda: True,
    words: str = "",
) -> None:
    """Run a server as a child process in the foreground, until Ctrl-C or SIGTERM. Both also end the server's children.

    Args:
        ready: polled until it returns true; then ``words`` are printed.

    Raises:
        StageFailed: the server ended by itself with an error.
    """
    deadline, asked, told = math.inf, False, False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    with handling(end):
        server = subprocess.Popen(
            command, cwd=context.project.root, env=environment, start_new_session=True, preexec_fn=_end_with_parent
        )
        try:
            while server.poll() is None and time.monotonic() < deadline:
                if asked and deadline == math.inf:
                    deadline = time.monotonic() + SERVER_GRACE_S
                    os.killpg(server.pid, signal.SIGINT)
                if not told and ready():
                    print(words, end="", flush=True)
                    told = True
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # the server if it did not end, and its children
            code = server.wait()
    if not asked and code != 0:
        raise StageFailed(f"the {name} ended with exit code {code}", 1)


def _end_with_parent() -> None:
    """Let Linux send this process a Ctrl-C when its parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def builds_index(stage: Stage) -> bool:
    """Return whether the stage builds a search index."""
    return (stage.config.get("task") or {}).get("class_path") == "retrieval.index.BuildIndex"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 turn", "2 turns"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
