"""The three runs that faults are put into, each in outputs of its own, and what a whole one must have made."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from callbacks.tracking.metrics_file import METRICS_FILE, read_metrics
from callbacks.tracking.run_info import RUN_ID_FILE
from common.digests import sha256
from experiments.commands.command import answers
from experiments.registry.overrides import Overrides
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph

EXPERIMENTS = Path(__file__).with_name("experiments")
RUNS = ("chaos_dgpo", "chaos_python", "chaos_ranks")
SERVED = "chaos_python"  # whose engine the ranks of chaos_ranks share, as two vLLM servers
TEMPORARY = Path(tempfile.gettempdir(), f"chaos-{os.getpid()}")  # of all runs
PORTS = (8193, 8194)  # of the vLLM servers, as chaos_ranks.yaml has them
ITERATIONS = 6
ENDS_WITHIN_S = 1200.0
SERVERS_START_S = 300.0
# What a run took, which may be more after a fault.
TAKEN = re.compile(r"^(time|throughput|memory)/|^train/tokens_computed")
TRACEBACK = "Traceback (most recent call last)"
# By a part of the command line, the first that fits.
ROLES = {
    "rollout.tools.python": "sandbox",
    "rollout.engines.worker": "engine",
    "vllm.entrypoints": "vLLM server",
    "multiprocessing.spawn": "vLLM engine",
    "retrieval.server": "search server",
    "torch.distributed.run": "torchrun",
    "experiments stage": "rank",
    "experiments engine-server": "launcher of a vLLM server",
    "experiments train": "launcher",
}


@dataclass(frozen=True)
class Made:
    """What a run has made: weights by their digest; metrics by step and name, without what they took."""

    weights: str
    metrics: Mapping[tuple[int, str], float]

    def differs(self, other: Made) -> str:
        """In what ``other`` is not this; empty where it is."""
        if missing := self.metrics.keys() - other.metrics.keys():
            return f"{len(missing)} metrics are lost, as {min(missing)}"
        if more := other.metrics.keys() - self.metrics.keys():
            return f"{len(more)} metrics too many, as {min(more)}"
        if changed := [key for key, value in self.metrics.items() if not _same(value, other.metrics[key])]:
            first = min(changed)
            return f"{first} is {other.metrics[first]}, not {self.metrics[first]}"
        return "" if self.weights == other.weights else "other weights"


def _same(first: float, second: float) -> bool:
    return first == second or math.isnan(first) and math.isnan(second)


@dataclass
class Place:
    """The outputs of one run, its processes and what a fault may reach. ``clock``: file of the seconds by which its
    wall clock is wrong, where it can be."""

    name: str
    outputs: Path
    clock: Path | None = None
    folder: Path = field(init=False)  # of the run's stage
    said: Path = field(init=False)  # what it wrote to the screen
    ports: list[int] = field(default_factory=list)  # on which it listened when the fault came
    process: psutil.Popen | None = None
    servers: dict[int, psutil.Popen] = field(default_factory=dict)  # by port

    def __post_init__(self) -> None:
        self.said = self.outputs.parent / f"{self.outputs.name}.screen"
        project = Project(experiment_dirs=(EXPERIMENTS, ROOT / "experiments" / "configs"), outputs=self.outputs)
        self.folder = Graph(project, self.name, Overrides(), None).target().folder
        self.student = next(self.outputs.glob("chaos_sft/*/model"), self.outputs)

    # ------------------------------------------------------------------ processes
    def command(self, *words: str, screen_of: Path | None = None) -> psutil.Popen:
        environment = os.environ | {
            "COMPACT_AGENTS_EXPERIMENTS": str(EXPERIMENTS),
            "COMPACT_AGENTS_OUTPUTS": str(self.outputs),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(TEMPORARY),
        }
        if self.clock is not None:
            environment |= {"LD_PRELOAD": str(self.clock.with_suffix(".so")), "CHAOS_CLOCK": str(self.clock)}
        with (screen_of or self.said).open("ab") as screen:
            return psutil.Popen(
                [sys.executable, "-m", "experiments", *words],
                cwd=ROOT, env=environment, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def start(self, *words: str) -> None:
        self.serve()
        self.ready()
        self.process = self.command("train", self.name, *words)

    def serve(self) -> None:
        """Start the vLLM servers that do not run, as a supervisor outside would."""
        for port in PORTS if self.name == "chaos_ranks" else ():
            if port not in self.servers or self.servers[port].poll() is not None:
                self.end_server(port)
                words = ("--checkpoint", str(self.student), "--port", str(port))
                # vLLM prints tracebacks when its engine dies.
                self.servers[port] = self.command(
                    "engine-server", SERVED, *words, screen_of=self.said.with_suffix(".vllm")
                )

    def ready(self) -> None:
        """Wait until the servers answer, which a run expects at its start."""
        deadline = time.monotonic() + SERVERS_START_S
        while not all(answers(port) for port in self.servers) and time.monotonic() < deadline:
            self.serve()
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """All of the run and of its servers, that live."""
        found: list[psutil.Process] = []
        for top in filter(None, (self.process, *self.servers.values())):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [top, *top.children(recursive=True)]
        return living(found)

    def kill(self) -> None:
        """Everything, at once."""
        killed = self.processes()
        kill_all(killed)
        psutil.wait_procs(killed, timeout=60)  # a zombie would pass for living where leftovers are swept
        self.process, self.servers = None, {}

    def end_servers(self) -> None:
        for port in list(self.servers):
            self.end_server(port)

    def end_server(self, port: int) -> None:
        server = self.servers.pop(port, None)
        if server is not None:
            below = server.children(recursive=True) if server.is_running() else []
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
                with contextlib.suppress(psutil.TimeoutExpired):
                    server.wait(timeout=30)
            kill_all([server, *below])
            server.wait()

    # ------------------------------------------------------------------ what is there
    def wait(self) -> int | None:
        """Its exit code; None: it did not end in time, and was killed."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                return None
            self.serve()
            time.sleep(0.1)
        return self.process.returncode

    def iterations(self) -> int:
        """How many have been logged."""
        path = self.folder / METRICS_FILE
        return len({row.step for row in read_metrics(path) if "train/reward" in row.metrics}) if path.exists() else 0

    def screen(self) -> str:
        return self.said.read_text(errors="replace") if self.said.exists() else ""

    def made(self) -> Made:
        values = {}
        for row in read_metrics(self.folder / METRICS_FILE):
            values |= {(row.step, key): value for key, value in row.metrics.items() if not TAKEN.match(key)}
        return Made(sha256(self.folder / "model" / "model.safetensors"), values)

    def tracked(self) -> set[tuple[int, str]]:
        """What MLflow's database has of it."""
        run = (self.folder / RUN_ID_FILE).read_text().strip()
        with contextlib.closing(sqlite3.connect(self.outputs / "mlflow.db")) as database:
            found = database.execute("SELECT step, key FROM metrics WHERE run_uuid = ?", (run,))
            return {(step, key) for step, key in found if not TAKEN.match(key)}


def roles(place: Place) -> list[tuple[psutil.Process, str]]:
    """The processes of a run, and what each is for."""
    found = []
    for process in place.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            name = next((name for part, name in ROLES.items() if part in words), "sandbox")  # its programs name nothing
            found.append((process, name))
    return found


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Without those that are gone, or dead and not yet waited for."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
