"""The type of a command, the table of all commands, and helpers that several share. Imports without torch."""

from __future__ import annotations

import argparse
import contextlib
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

SERVER_GRACE_S = 10.0  # for a server to end by itself

Run = Callable[[argparse.Namespace, RunContext], int | None]
Option = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``python -m experiments``."""

    name: str
    help: str
    run: Run
    options: tuple[Option, ...]
    experiment: bool
    overrides: bool


COMMANDS: dict[str, Command] = {}


def option(*flags: str, **settings: Any) -> Option:
    """As ``ArgumentParser.add_argument`` takes it."""
    return flags, settings


def command(
    name: str, help: str, *options: Option, experiment: bool = True, overrides: bool = True
) -> Callable[[Run], Run]:
    """Make the decorated function a command. It prints, raises ExperimentError for what the user has to fix, and keeps
    heavy imports inside.

    Args:
        options: of its own, besides the following.
        experiment: it takes an experiment's name and ``--seed``.
        overrides: it takes overrides of the configuration (``--model.x 1``).
    """

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(name, help, run, options, experiment, overrides)
        return run

    return register


COMPARE = option("--compare", action="store_true", help="with the experiments that it is compared with")


def make_graph(context: RunContext) -> Graph:
    return Graph(context.project, context.target, cli_overrides.parse(context.arguments), context.seed)


def unique_needs(stages: Sequence[Stage]) -> list[Need]:
    return list({need.path: need for stage in stages for need in stage.needs}.values())


def numbers(option: str, text: str, example: str, least: int = 0) -> list[int]:
    """Raises ExperimentError for a list of anything else than numbers from ``least`` on."""
    if not all(part.strip().isdigit() and int(part) >= least for part in text.split(",")):
        raise ExperimentError(f"{option} {text}: expected numbers separated by commas, as in {example}")
    return [int(part) for part in text.split(",")]


def require_free_port(port: int, otherwise: str) -> None:
    """``otherwise``: a command with another port. Raises ExperimentError for one that is taken, or that is no port."""
    if not 0 <= port < 1 << 16:
        raise ExperimentError(f"port {port}: expected a number from 0 to 65535, as in {otherwise}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ExperimentError(f"port {port} is in use ({error.strerror}); choose another: {otherwise}") from None


def answers(port: int) -> bool:
    """Whether a server on this machine answers HTTP on the port."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
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
    """Run a server in the foreground until Ctrl-C or SIGTERM, which end the server's own children, too.

    Args:
        ready: asked until it is true; then ``words`` are printed.

    Raises:
        StageFailed: the server ends otherwise.
    """
    deadline, asked, told = math.inf, False, False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    with handling(end):
        server = subprocess.Popen(command, cwd=context.project.root, env=environment, start_new_session=True)
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
                os.killpg(server.pid, signal.SIGKILL)  # what did not end, and what it left behind
            code = server.wait()
    if not asked and code != 0:
        raise StageFailed(f"the {name} ended with exit code {code}", 1)


def builds_index(stage: Stage) -> bool:
    """Whether the stage makes a search index."""
    return (stage.config.get("task") or {}).get("class_path") == "retrieval.index.BuildIndex"
