"""What ``run_group`` leaves behind: nothing."""

import sys
import time

import psutil
import pytest

from tests.processes import run_group

SLEEPERS = """
import subprocess, sys, time
for session in (False, True):  # torchrun's ranks are in sessions of their own
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
    print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def gone(pid: str) -> bool:
    return not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_a_timeout_leaves_no_process_behind_and_says_what_was_written():
    with pytest.raises(TimeoutError, match=r"not done after 2 s and was killed.*wrote:\n(\d+)\n(\d+)\n$") as error:
        run_group([sys.executable, "-c", SLEEPERS, "600"], timeout=2)
    pids = str(error.value).split()[-2:]
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.05)


def test_output_and_return_code_of_a_command_that_ends():
    code = "import os, sys; print(os.environ['WORD']); print('b', file=sys.stderr); sys.exit(3)"
    done = run_group([sys.executable, "-c", code], {"WORD": "a"}, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\n", "b\n")
