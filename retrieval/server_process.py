"""A search server as a child process. A server that dies is replaced at the same address."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from common.restarts import Restarts, RestartsUsedUp
from retrieval.types import RetrieverStartError

LOG_LINES = 15  # lines of the log's end in the message of a failed start
PAUSE_S = 2.0  # between a failed start and the next one

_ROOT = Path(__file__).resolve().parent.parent
logger = logging.getLogger(__name__)


class ServerProcess:
    """Runs a search server (``python -m retrieval.server``) on a socket of this process, and restarts it when it dies.
    Between two servers requests wait in the socket.

    Args:
        command: of the server, without its socket, its pipe for progress and its parent's id.
        log: file for its output.
        start_timeout: seconds without a progress report until it is ready.
        restarts: after the last one the socket is closed, and ``failure`` has the reason.
    """

    def __init__(self, command: list[str], log: Path, start_timeout: float, restarts: Restarts) -> None:
        self.failure: str | None = None
        self.log = log
        self._start_timeout, self._restarts = start_timeout, restarts
        self._command = [*command, "--parent", str(os.getpid())]
        # Also for later servers, because a trainer sets variables meanwhile.
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._child: subprocess.Popen | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()  # reentrant: garbage collection may call `end` anywhere

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def start(self) -> str:
        """Start the search server and wait until it is loaded. Returns its URL. Raises RetrieverStartError with the
        log's end.
        """
        try:
            child, pipe = self._spawn()
            report = self._until_ready(child, pipe)
        except BaseException:
            self.end()
            raise
        threading.Thread(target=self._keep, args=(child,), daemon=True, name="search-server").start()
        return report["url"]

    def end(self) -> None:
        """End the search server and wait for its end, from any thread. Idempotent."""
        with self._lock:
            self._ended.set()
            self._listener.close()
        if self._child is not None:
            _terminate(self._child)

    def _spawn(self) -> tuple[subprocess.Popen, int]:
        """Start a server process. Returns it, and the file descriptor of its progress reports."""
        read, write = os.pipe()
        try:
            with self._lock, self.log.open("ab") as log:
                if self._ended.is_set():
                    raise RetrieverStartError("the search server was ended")
                inherited = (self._listener.fileno(), write)
                self._child = subprocess.Popen(
                    [*self._command, "--listen-fd", str(inherited[0]), "--ready-fd", str(write)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    pass_fds=inherited, start_new_session=True, env=self._environment,
                )  # fmt: skip
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return self._child, read

    def _until_ready(self, child: subprocess.Popen, pipe: int) -> dict[str, Any]:
        report: dict[str, Any] = {"loading": None}
        said = ""
        with open(pipe, "rb", buffering=0) as lines:  # a buffer would hide received lines from select()
            while "loading" in report:
                if not select.select([lines], [], [], self._start_timeout)[0]:
                    _terminate(child)
                    late = f"the retriever reported no progress for {self._start_timeout} s while starting{said}"
                    raise RetrieverStartError(f"{late}; {self._log_tail()}")
                line = lines.readline()
                if not line:
                    raise RetrieverStartError(f"the retriever {how_ended(child)} while starting; {self._log_tail()}")
                report = orjson.loads(line)
                said = f" (last report: {report.get('loading')})"
        return report

    def _keep(self, child: subprocess.Popen | None) -> None:
        """Restart the search server whenever it ends, until `end` or the last restart. Runs in its own thread."""
        try:
            while child is not None:
                child = self._restarts.revive(self._restart, how_ended(child), self._ended, PAUSE_S)
        except RestartsUsedUp as error:
            # `failure` is set before the socket refuses clients, which then read it.
            self.failure = f"the search server {error}; {self._log_tail(1, ' ')}"
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it, too
            self._listener.close()

    def _restart(self, why: str) -> subprocess.Popen:
        logger.warning("the search server %s. It is restarted (%s)", why, self._restarts)
        child, pipe = self._spawn()
        self._until_ready(child, pipe)
        return child

    def _log_tail(self, lines: int = LOG_LINES, between: str = "\n") -> str:
        """Return the end of the server's log as text, because a temporary log is removed with the run."""
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return between.join([f"the end of its log ({self.log}):", *text.splitlines()[-lines:]])


def how_ended(child: subprocess.Popen) -> str:
    """Wait until a child process ends. Returns how it ended, in words."""
    code = child.wait()
    if code >= 0:
        return f"ended with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _terminate(process: subprocess.Popen, patience: float = 10) -> None:
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
