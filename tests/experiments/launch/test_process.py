"""Child processes: what reaches the terminal and the log, and what Ctrl-C and a killed parent do."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from experiments.launch import stage_process
from experiments.registry.project import ROOT
from tests.processes import gone_within

CHILD = """
import os, signal, sys, time
import polars  # it chains to the handler of SIGINT that it finds
from experiments.stages.stage import die_with_parent
die_with_parent(int(os.environ["COMPACT_AGENTS_PARENT"]))
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGINT, lambda *a: print("clinging", flush=True))
try:
    print("child", os.getpid(), flush=True)
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    print("cleaning up", flush=True)
    sys.exit(130)
"""
PARENT = """
import os, sys
from pathlib import Path
from experiments.launch import fork_server
from experiments.launch.stage_process import run_child
from experiments.stages.stage import PARENT_VARIABLE
if __name__ == "__main__":
    fork_server.LIBRARIES = ()
    result = run_child(
        [sys.executable, sys.argv[1], sys.argv[2]], cwd=Path.cwd(),
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        log=Path(sys.argv[3]), fork_server=fork_server.ForkServer() if sys.argv[4] == "fork" else None,
    )
    print("result", result.returncode, result.interrupted, flush=True)
"""


starts = pytest.mark.parametrize("start", ["interpreter", "fork"])


class Run:
    """PARENT in a process, which runs CHILD in an interpreter of its own or as a fork."""

    def __init__(self, tmp_path: Path, mode: str, start: str, ignores: tuple[signal.Signals, ...] = ()) -> None:
        child, parent = tmp_path / "child.py", tmp_path / "parent.py"
        child.write_text(textwrap.dedent(CHILD))
        parent.write_text(textwrap.dedent(PARENT))
        self.log = tmp_path / "log"
        self.process = subprocess.Popen(
            [sys.executable, str(parent), str(child), mode, str(self.log), start],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignores],
        )

    def until(self, word: str) -> str:
        for line in self.process.stdout:
            if word in line:
                return line
        raise AssertionError(f"'{word}' never came")


@starts
def test_first_ctrl_c_lets_the_child_clean_up(tmp_path, start):
    run = Run(tmp_path, "plain", start)
    run.until("child")
    run.process.send_signal(signal.SIGINT)
    rest = run.process.communicate(timeout=300)[0]
    assert "stopping cleanly" in rest and "cleaning up" in rest and "result 130 True" in rest
    assert "cleaning up" in run.log.read_text()


@starts
def test_a_job_in_the_background_stops_at_sigint_and_survives_a_hang_up(tmp_path, start):
    """A script starts such jobs with SIGINT ignored, nohup with SIGHUP ignored."""
    run = Run(tmp_path, "plain", start, (signal.SIGINT, signal.SIGHUP))
    run.until("child")
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    rest = run.process.communicate(timeout=300)[0]
    assert rest.count("stopping cleanly") == 1 and "cleaning up" in rest and "result 130 True" in rest


@starts
def test_second_ctrl_c_ends_it_at_once(tmp_path, start):
    run = Run(tmp_path, "stubborn", start)
    run.until("child")
    run.process.send_signal(signal.SIGINT)
    run.until("clinging")
    run.process.send_signal(signal.SIGINT)
    assert "result -9 True" in run.process.communicate(timeout=300)[0]


@starts
def test_the_child_dies_when_we_are_killed(tmp_path, start):
    run = Run(tmp_path, "stubborn", start)
    child = int(run.until("child").split()[1])
    run.process.kill()
    run.process.wait()
    assert gone_within(child)


def test_what_the_watch_reports_ends_a_child_that_does_not_end_by_itself(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.setattr(stage_process, "GRACE_S", 0.1)
    reports = iter([None, "node 1 has gone"])
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(stage_process, "WATCH_S", 0.05)
    result = stage_process.run_child(
        command, cwd=ROOT, env=dict(os.environ), log=tmp_path / "log", watch=lambda: next(reports)
    )
    assert (result.returncode, result.interrupted, result.trouble) == (-signal.SIGKILL, False, "node 1 has gone")
    assert b"node 1 has gone; the processes here end in" in capfdbinary.readouterr().out


def test_what_this_process_logs_meanwhile_is_on_the_screen_and_in_the_log(tmp_path, capfdbinary):
    def watch():
        logging.getLogger("retrieval").warning("the search server was %s", "killed")

    log = tmp_path / "log"
    until = f"import time\nwhile b'killed' not in open({str(log)!r}, 'rb').read(): time.sleep(0.01)"
    command = [sys.executable, "-c", until]
    assert (
        stage_process.run_child(command, cwd=ROOT, env=dict(os.environ), log=tmp_path / "log", watch=watch).returncode
        == 0
    )
    for said in (capfdbinary.readouterr().out, (tmp_path / "log").read_bytes()):
        assert said.startswith(b"the search server was killed\n")


def test_a_child_that_fails_before_the_next_look_is_explained_by_the_watch(tmp_path):
    reports = iter([None, "node 1 has gone"])
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    result = stage_process.run_child(
        command, cwd=ROOT, env=dict(os.environ), log=tmp_path / "log", watch=lambda: next(reports)
    )
    assert (result.returncode, result.trouble) == (1, "node 1 has gone")
