"""What ``run_group`` leaves behind: nothing."""

import sys

import pytest

from tests.processes import gone_within, run_group, with_patience

SLEEPERS = """
import subprocess, sys, time
for session in (False, True):  # torchrun's ranks are in sessions of their own
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
    print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_timeout_leaves_no_process_behind_and_says_what_was_written():
    def check(seconds):
        said = rf"not done after {seconds} s and was killed.*wrote:\n(\d+)\n(\d+)\n$"
        with pytest.raises(TimeoutError, match=said) as error:
            run_group([sys.executable, "-c", SLEEPERS, "600"], timeout=seconds)
        assert all(gone_within(int(pid)) for pid in str(error.value).split()[-2:])

    with_patience(check, 2, 20, 120)


def test_output_and_return_code_of_a_command_that_ends():
    code = "import os, sys; print(os.environ['WORD']); print('b', file=sys.stderr); sys.exit(3)"
    done = run_group([sys.executable, "-c", code], {"WORD": "a"}, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\n", "b\n")
