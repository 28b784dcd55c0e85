"""Real engine servers in processes of their own, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from rollout.engines.process import ROOT


class Running:
    """One server; ``kill`` takes it and its engine away; ``begin`` and ``wait`` start another on the same port."""

    def __init__(self, model: Path, engine: str = "PlainEngine", **options) -> None:
        path = engine if "." in engine else f"tests.rollout.engines.plain_backend.{engine}"
        self._config = {"class_path": path, "init_args": {"model": str(model), "max_length": 256, **options}}
        self.port = 0
        self.begin()

    def begin(self) -> None:
        words = ["--engine", json.dumps(self._config), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout.engines.server.server", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> None:
        line = self.process.stdout.readline()
        assert line.startswith("engine ready at http://127.0.0.1:"), line
        self.url = line.split()[3]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def running(*servers: Running):
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
