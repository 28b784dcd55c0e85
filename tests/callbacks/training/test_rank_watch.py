"""A rank that dies ends the run, a rank that is stuck is named; nothing is left over, and the run can be resumed."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from callbacks.training import rank_watch
from callbacks.training.rank_watch import RankWatch, main_thread
from callbacks.training.resume import find_checkpoint
from data_modules.loading.rollouts_ahead import RolloutsAhead
from experiments.launch.torchrun import torchrun_command
from experiments.registry.hardware import Ranks
from experiments.registry.project import ROOT

WORKER = Path(__file__).with_name("rank_watch_worker.py")


class Run:
    def __init__(self, folder, *words):
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "log.txt"
        self.temporary = tempfile.TemporaryDirectory()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TMPDIR": self.temporary.name}
        command = torchrun_command([str(WORKER), str(folder), *words], Ranks(1, 2), None)
        options = {"env": environment, "cwd": ROOT, "start_new_session": True}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.temporary.cleanup()

    def after_iterations(self, n):
        """Wait until so many checkpoints have been seen."""
        seen, end = set(), time.monotonic() + 300
        while len(seen) < n:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, "no checkpoint came"
            if path := find_checkpoint(self.folder):
                seen.add(path.resolve().name)
            time.sleep(0.05)

    def kill(self, rank):
        os.kill(int((self.folder / f"pid{rank}").read_text()), signal.SIGKILL)

    def left(self):
        """Processes of this run that still live; torchrun's ranks are in sessions of their own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes():  # of a zombie it is empty
                    found.append(int(path.parent.name))
        return found

    def nothing_is_left_within(self, seconds):
        end = time.monotonic() + seconds
        while self.left() and time.monotonic() < end:
            time.sleep(0.1)
        self.process.wait(60)
        assert not self.left(), self.log.read_text()[-3000:]
        folders = os.listdir(self.temporary.name)
        assert not [name for name in folders if name.startswith(("torchrun", "torchelastic"))], folders
        return self.log.read_text()


@pytest.mark.slow
def test_a_rank_is_killed_the_others_stop_and_the_run_goes_on_until_one_does_not_move(tmp_path):
    folder = tmp_path / "run"
    with Run(folder) as run:
        run.after_iterations(2)
        run.kill(1)
        said = run.nothing_is_left_within(300)
    assert run.process.returncode == 1 and "rank 1 ended first: SIGKILL" in said, said
    done = int(find_checkpoint(folder).resolve().name.partition("-")[2].partition(".")[0])

    with Run(folder, "1") as run:
        end = time.monotonic() + 400  # its start included
        while not ("warning: rank 1 (host " in (said := run.log.read_text()) and "warning: rank 0 (host " in said):
            assert run.process.poll() is None and time.monotonic() < end, said
            time.sleep(0.5)
        run.process.terminate()
        said = run.nothing_is_left_within(300)
    stack = said.split("warning: rank 1 (host ")[1].split("warning: rank 0 ")[0]
    assert "rank_watch_worker.py" in stack and "time.sleep(1000)" in stack and "on_train_batch_end" in stack
    assert "distributed" in said.split("warning: rank 0 (host ")[1], "it waits in a collective"
    checkpoint = int(find_checkpoint(folder).resolve().name.partition("-")[2].partition(".")[0])
    assert checkpoint > done, "it went on where it was"


def seen_while(work):
    """What a thread sees twice of this one, while ``work`` blocks it until then."""
    found, done = [], concurrent.futures.Future()

    def look():
        while not ("waiter.acquire()" in (stack := main_thread()[1]) and "futures/_base.py" in stack):  # the result
            time.sleep(0.01)
        found.extend([main_thread(), main_thread()])
        done.set_result(None)

    threading.Thread(target=look).start()
    work(done)
    return found


def test_where_the_main_thread_is():
    (first, stack), (second, _) = seen_while(lambda done: done.result())
    assert first == second != main_thread()[0]
    assert "seen_while" in stack and "done.result()" in stack


def test_waiting_for_rollouts_ahead_of_the_training_is_rolling_out():
    (mark, stack), _ = seen_while(lambda done: RolloutsAhead(None, None, 1, {0: done}).settle())
    assert mark is None and "rollouts_ahead.py" in stack


def test_a_stuck_rank_is_reported_once(monkeypatch, capsys):
    looked, positions = threading.Event(), iter([(1,)] * 6)

    def look():
        if (mark := next(positions, None)) is None:
            looked.set()
            threading.Event().wait()  # the daemon thread stays here
        return mark, "line 3"

    monkeypatch.setattr(rank_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(rank_watch, "main_thread", look)
    monkeypatch.setattr(rank_watch.faulthandler, "enable", lambda file: None)
    RankWatch(report_after_s=0.02).setup(SimpleNamespace(global_rank=1, world_size=2), None, "fit")
    assert looked.wait(300)
    said = capsys.readouterr().err
    assert said.count("warning: rank 1 (host") == 1 and "line 3" in said
