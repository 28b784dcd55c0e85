"""A rank that dies, or does not move: the others say so and end, nothing is left over, and the run goes on after it."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from callbacks.heartbeats import Beat, alive, lost, own_beat, stall_message, stalled_s, table
from callbacks.rank_watch import EXIT_CODE, RankWatch
from callbacks.resume import find_checkpoint
from callbacks.whereabouts import whereabouts
from data_modules.rollouts_ahead import RolloutsAhead

WORKER = Path(__file__).with_name("rank_watch_worker.py")
MOST = 2000  # iterations: more than a run makes before it is ended


class Run:
    def __init__(self, folder, *words):
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "log.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, str(WORKER), str(folder), *words]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

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
        """Processes of this run that still live."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(path.parent.name)
        return found

    def nothing_is_left_within(self, seconds):
        end = time.monotonic() + seconds
        while self.left() and time.monotonic() < end:
            time.sleep(0.1)
        self.process.wait(5)
        assert not self.left(), self.log.read_text()[-3000:]
        return self.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("zero3", 1)])
def test_a_rank_is_killed_the_others_stop_and_the_run_goes_on(tmp_path, strategy, victim):
    folder = tmp_path / "run"
    with Run(folder, strategy, str(MOST)) as run:
        run.after_iterations(3)
        run.kill(victim)
        said = run.nothing_is_left_within(60)
    assert run.process.returncode == (EXIT_CODE if victim else -signal.SIGKILL)
    assert f"rank {victim} (host" in said and "its process has ended without a word" in said
    assert "GONE; last seen in" in said and "RESUME=last" in said
    assert said.count("error: a rank is missing") == 1 and "Traceback" not in said
    assert "a rank is missing" in (folder / "ranks.txt").read_text()
    done = int(find_checkpoint(folder).resolve().name.partition("-")[2].partition(".")[0])

    if strategy == "ddp":  # and now one of them does not move
        with Run(folder, "ddp", str(MOST), "1") as run:
            run.process.wait(400)  # its start included
            said = run.nothing_is_left_within(20)
        assert run.process.returncode == EXIT_CODE
        assert "warning: ranks have not moved for" in said and "error: ranks have not moved for" in said
        assert "they wait for rank 1; the run ends" in said, said
        lines = [line for line in said.splitlines() if line.startswith("1 ")]
        assert lines and "rank_watch_worker.py" in lines[-1] and "on_train_batch_end" in lines[-1]
        assert any("waiting for the others" in line for line in said.splitlines() if line.startswith("0 "))
    fails = strategy == "ddp"  # after its end, in the data's setup, which comes before any hook of a callback
    with Run(folder, strategy, str(done + 12), *(["test"] if fails else [])) as run:
        code, said = run.process.wait(400), run.log.read_text()
        assert code == (EXIT_CODE if fails else 0), said[-3000:]
    if fails:
        assert said.count("error: a rank is missing") == 1, said
        assert "stopped by itself: ValueError: there are no questions on this rank" in said
    assert torch.load(folder / "done.pt") == done + 12, "it went on where it was"


def beat(rank, **options):
    return Beat(**({"rank": rank, "host": f"h{rank}", "node": str(rank), "pid": 7, "born": "1"} | options))


def test_who_is_lost():
    me = own_beat(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        born = Path(f"/proc/{child.pid}/stat").read_text().split()[21]
        here = Beat(1, me.host, me.node, child.pid, born)
        assert alive(me) and alive(here)
        silent = {0: 0.0, 1: 99.0, 2: 20.0}
        others = {0: me, 1: here, 2: beat(2)}
        assert lost(me, others, silent, 30) == {}, "here the process counts, elsewhere the silence"
        assert list(lost(me, others, silent, 10)) == [2]
        failed = others | {1: beat(1, state="ValueError: no")}
        assert lost(me, failed, silent, 100) == {1: "stopped by itself: ValueError: no"}
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert list(lost(me, others, silent, 30)) == [1], "a zombie has died"
    finally:
        child.kill()
        child.wait()


def test_who_waits_for_whom():
    silent = dict.fromkeys(range(3), 0.0)
    rolling = {r: beat(r, rolling_out=True, still_s=5000.0, place="rollout") for r in range(3)}
    assert stalled_s(rolling, silent) == 0.0, "all of them may roll out for hours"
    waits = beat(1, waiting=True, still_s=700.0, place="end of the rollout, waiting for the others")
    ranks = rolling | {1: waits, 2: beat(2, waiting=True, still_s=650.0)}
    assert stalled_s(ranks, silent) == 700.0
    said = stall_message(ranks, silent, 1800, end=False)
    assert "not moved for 700 s: they wait for rank 0; the run ends when it is 1800 s" in said and "RESUME" not in said
    together = {r: beat(r, waiting=True, still_s=700.0) for r in range(2)}
    assert "all ranks wait for each other; the run ends here" in stall_message(together, silent, 600, end=True)
    assert "all ranks wait for each other; they go on waiting." in stall_message(together, silent, None, end=False)
    first, *rows = table(ranks, silent, {2: "dead"}).splitlines()
    assert first.split() == ["rank", "host", "pid", "iteration", "for", "where"]
    assert rows[1].split(maxsplit=6) == ["1", "h1", "7", "0", "700", "s", waits.place] and "GONE" in rows[2]


def test_where_the_main_thread_is():
    found, ready, go = [], threading.Event(), threading.Event()

    def look():
        ready.wait()
        time.sleep(0.2)
        found.extend([whereabouts(), whereabouts()])
        go.set()

    thread = threading.Thread(target=look)
    thread.start()
    ready.set()
    go.wait()
    moved = whereabouts()
    thread.join()
    assert found[0].mark == found[1].mark != moved.mark
    assert "test_rank_watch.py" in found[0].text and "test_where_the_main_thread_is" in found[0].text
    assert not found[0].waiting and not found[0].rolling_out


def test_waiting_for_rollouts_ahead_of_the_training_is_rolling_out():
    pending, found = concurrent.futures.Future(), []

    def look():
        time.sleep(0.2)
        found.append(whereabouts())
        pending.set_result(None)

    threading.Thread(target=look).start()
    RolloutsAhead(None, None, 1, {0: pending}).settle()
    assert found[0].rolling_out and not found[0].waiting and found[0].text.startswith("rollout (data_modules/")


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least three of it"):
        RankWatch(dead_after_s=2.0)
    with pytest.raises(ValueError, match="stop_after_s is 5"):
        RankWatch(stop_after_s=5.0)
