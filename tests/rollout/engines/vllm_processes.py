"""Real ``vllm serve`` processes for tests, with the flags that ``make engine`` gives them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from common.secret import SECRET_VARIABLE
from rollout.engines.process import ROOT
from rollout.engines.vllm_servers.flags import serve_command

SECRET = "the-secret-of-these-servers"
STARTS_WITHIN_S = 400


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Running:
    """One server; ``kill`` ends it and its engine; ``begin`` and ``wait`` start another at the same address."""

    def __init__(self, model: Path, lora_rank: int = 0, secret: str = SECRET, **options) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = {"model": str(model), "max_length": 256, **options}
        self._command, added = serve_command(options, self.port, "127.0.0.1", True, "files", lora_rank, [])
        added |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", SECRET_VARIABLE: secret}
        self._environment = os.environ | added
        self.said = tempfile.TemporaryFile("w+")
        self.begin()

    def begin(self) -> None:
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=self.said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.kill()
        self.said.seek(0)
        raise AssertionError(f"no server: {self.said.read()[-4000:]}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(*servers: Running):
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
            server.said.close()
