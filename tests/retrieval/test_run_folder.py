"""The temporary folder of a run, with real processes and real ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.run_folder import run_folder

ROOT = Path(__file__).resolve().parents[2]
# A run with a child process and a fork: each leaves a file behind. Then it waits for a line, and ends.
RUN = """
import os, subprocess, sys, tempfile
from common.run_folder import outside_environment, remove_run_folder, run_folder, use_run_folder
before = dict(os.environ)
use_run_folder()
assert outside_environment() == before != dict(os.environ)
tempfile.mkstemp(".yaml")
child = "import tempfile; from common.run_folder import *; use_run_folder(); tempfile.mkdtemp(); print(run_folder())"
assert subprocess.check_output([sys.executable, "-c", child], text=True).strip() == str(run_folder())
if os.fork() == 0:
    remove_run_folder()
    os._exit(0)
os.wait()
print(run_folder(), len(os.listdir(run_folder())), os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
if sys.stdin.readline() == "os._exit\\n":
    remove_run_folder()
    os._exit(0)
raise SystemExit(3)
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    made, files, kernels = process.stdout.readline().split()
    assert files == "3" and Path(made).parent == Path(kernels).parent == folder
    return process, Path(made)


@pytest.mark.parametrize("end", ["", "os._exit"])
def test_a_run_that_ends_leaves_nothing(tmp_path, end):
    process, _ = start(tmp_path)
    process.communicate(f"{end}\n")
    assert not list(tmp_path.iterdir()) and process.returncode == (0 if end else 3)


def test_the_next_start_removes_what_killed_runs_left_and_nothing_else(tmp_path):
    killed, left = start(tmp_path)
    living, used = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    mine = tmp_path / "ca-mine"  # of a user, named as ours are
    mine.mkdir()
    assert left.exists()
    later, latest = start(tmp_path)
    assert {*tmp_path.iterdir()} == {used, mine, latest}
    for process in (living, later):
        process.communicate("\n")
    assert {*tmp_path.iterdir()} == {mine}


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr("common.run_folder._made", {})
    assert run_folder() == tmp_path and not list(tmp_path.iterdir())
