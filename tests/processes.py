"""Subprocesses of tests that start processes of their own: ranks, engines, servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]


def run_group(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 400, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own; what is left of its processes when it ends, or is late, is killed.

    Args:
        command: as for ``subprocess.run``.
        env: the whole environment; None for this process's.
        timeout: seconds.
        cwd: working folder.

    Returns:
        What ``subprocess.run`` does, with stdout and stderr as text; the caller looks at the return code.

    Raises:
        TimeoutError: it was not done in time; with the ends of what it had written.
    """
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise TimeoutError(
            f"{command[:4]} was not done after {timeout} s and was killed with all its processes; the machine may be "
            f"busy, or ranks wait for each other. It wrote:\n{out[-3000:]}{err[-5000:]}"
        ) from None
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def run_ranks(worker: Path | str, *arguments: object, timeout: float = 420) -> str:
    """Run a script that starts several ranks, each with one thread, to a good end; returns all that it wrote."""
    command = [sys.executable, str(worker), *map(str, arguments)]
    # Imports of dynamo take half of the time. Memory that nobody wrote holds huge numbers, so that reading it shows.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "MALLOC_PERTURB_": "128"}
    done = run_group(command, environment, timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill what ``process``, started with ``start_new_session``, has started, and it itself."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)  # torchrun gives each rank a session of its own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()


def alive(pid: int) -> bool:
    """Whether it runs; not one that is dead and not yet waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_patience(check: Callable[[float], None], *seconds: float) -> None:
    """Run a check with the first deadline, and where it fails with the next, longer one. For checks in which one part
    of the work must miss the deadline and the other part must keep it, on a machine of any speed."""
    *earlier, last = seconds
    for deadline in earlier:
        try:
            return check(deadline)
        except (Exception, pytest.fail.Exception) as error:
            print(f"failed with a deadline of {deadline} s, is repeated with a longer one: {error}")
    return check(last)


def gone_within(pid: int, seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)
