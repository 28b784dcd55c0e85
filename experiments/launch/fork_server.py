"""Starts the stages of a chain as forks of a process that has imported the large libraries.

Importing torch, Lightning and transformers takes 5 to 10 s of processor time, and a chain has up to 15 stages. The
server of multiprocessing only imports, so that its forks inherit no thread, no GPU and no random state.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from experiments.stages.stage import PARENT_VARIABLE, set_environment

LIBRARIES = ("torch", "lightning.pytorch.cli", "transformers.models.auto.modeling_auto", "mlflow")


class ForkServer:
    """A server process that imports the large libraries once, then starts stages as forks. It starts importing on
    construction, and ends with this process."""

    def __init__(self) -> None:
        # Interpreters and libraries read some variables of a stage only when they start.
        os.environ.update(set_environment(dict(os.environ)))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["experiments.launch.forked", *LIBRARIES])
        forkserver.ensure_running()
        del os.environ[PARENT_VARIABLE]  # for the server alone

    def start(
        self, command: Sequence[str], *, cwd: Path, env: dict[str, str], outputs: tuple[int, int] | None = None
    ) -> ForkedProcess:
        """Start a Python command in a fork of the server, as ``Popen(command, start_new_session=True)`` would. The
        ``command`` must be ``python FILE ...`` or ``python -m MODULE ...`` of this interpreter.

        Args:
            outputs: file descriptors for stdout and stderr; default: one pipe, ``ForkedProcess.stdout``.
        """
        read = None
        if outputs is None:
            read, write = os.pipe()
            ends = [Connection(write, readable=False), Connection(os.dup(write), readable=False)]
        else:
            ends = [Connection(os.dup(fd), readable=False) for fd in outputs]
        process = self._context.Process(target=_run, args=(list(command[1:]), str(cwd), env, *ends))
        process.start()
        for end in ends:
            end.close()
        return ForkedProcess(process, read)


class ForkedProcess:
    """A child process of the fork server, with the methods of ``subprocess.Popen`` that the runner uses."""

    def __init__(self, process: BaseProcess, output: int | None) -> None:
        self._process = process
        self.stdout = None if output is None else os.fdopen(output, "rb", buffering=0)
        assert process.pid is not None  # it has started
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(arguments: list[str], cwd: str, env: dict[str, str], stdout: Connection, stderr: Connection) -> None:
    """Run a Python command in the forked process, as a new interpreter would."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server may have inherited SIG_IGN, see run_child
    for target, source in ((1, stdout), (2, stderr)):
        os.dup2(source.fileno(), target)
        source.close()
    os.environ.clear()
    os.environ.update(env)
    if PARENT_VARIABLE in env:
        os.environ[PARENT_VARIABLE] = str(os.getppid())  # the server, which ends with the process that started it
    os.chdir(cwd)
    sys.argv = arguments
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them in its children
