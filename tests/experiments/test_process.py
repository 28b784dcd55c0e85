"""Child processes: what reaches the terminal and the log, and what Ctrl-C and a killed parent do."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from experiments.process import _LogWriter
from experiments.project import ROOT

CHILD = """
import os, signal, sys, time
from experiments.process import die_with_parent
die_with_parent(int(os.environ["PARENT"]))
if sys.stdout.isatty():
    print("tty", os.get_terminal_size().columns, flush=True)
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
from experiments.process import run_child
result = run_child(
    [sys.executable, sys.argv[1], sys.argv[2]], cwd=Path.cwd(), env={**os.environ, "PARENT": str(os.getpid())},
    log=Path(sys.argv[3]), on_interrupt=lambda n: print("press", n, flush=True),
)
print("result", result.returncode, result.interrupted, flush=True)
"""


class Run:
    """PARENT in a process, which runs CHILD."""

    def __init__(self, tmp_path: Path, mode: str, **kwargs) -> None:
        child, parent = tmp_path / "child.py", tmp_path / "parent.py"
        child.write_text(textwrap.dedent(CHILD))
        parent.write_text(textwrap.dedent(PARENT))
        self.log = tmp_path / "log"
        self.process = subprocess.Popen(
            [sys.executable, str(parent), str(child), mode, str(self.log)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            **({"stdout": subprocess.PIPE} | kwargs),
        )

    def until(self, word: str) -> str:
        for line in self.process.stdout:
            if word in line:
                return line
        raise AssertionError(f"'{word}' never came")


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_first_ctrl_c_lets_the_child_clean_up(tmp_path):
    run = Run(tmp_path, "plain")
    run.until("child")
    run.process.send_signal(signal.SIGINT)
    rest = run.process.communicate(timeout=20)[0]
    assert "press 1" in rest and "cleaning up" in rest and "result 130 True" in rest
    assert "cleaning up" in run.log.read_text()


def test_second_ctrl_c_ends_it_at_once(tmp_path):
    run = Run(tmp_path, "stubborn")
    run.until("child")
    run.process.send_signal(signal.SIGINT)
    run.until("clinging")
    run.process.send_signal(signal.SIGINT)
    assert "result -9 True" in run.process.communicate(timeout=20)[0]


def test_the_child_dies_when_we_are_killed(tmp_path):
    run = Run(tmp_path, "stubborn")
    child = int(run.until("child").split()[1])
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_on_a_terminal_the_child_has_one_of_the_same_width(tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 97, 0, 0))
    run = Run(tmp_path, "plain", stdout=theirs)
    os.close(theirs)
    seen = b""
    while b"child" not in seen:
        seen += os.read(ours, 1024)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=20) == 0
    os.close(ours)
    assert b"tty 97" in seen


def test_the_log_holds_lines_without_colours_and_redraws():
    stream = io.BytesIO()
    log = _LogWriter(stream)
    for part in [b"\x1b[32mgreen\x1b[0m\nstep 1", b"\rstep 2\rstep ", b"3\r\n", b"\x1b[2K\rlast"]:
        log.write(part)
    log.close()
    assert stream.getvalue() == b"green\nstep 3\nlast\n"
