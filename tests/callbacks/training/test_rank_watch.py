"""A rank that dies, or does not move: the others say so and end, nothing is left over, and the run goes on after it."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from callbacks.training.rank_watch import (
    EXIT_CODE,
    Beat,
    RankWatch,
    _Watch,
    lost,
    main_thread,
    open_store,
    report,
    stall_report,
    stalled_s,
)
from callbacks.training.resume import find_checkpoint
from data_modules.loading.rollouts_ahead import RolloutsAhead
from experiments.launch.torchrun import torchrun_command
from experiments.registry.hardware import Ranks
from experiments.registry.project import ROOT
from tests.processes import with_patience

WORKER = Path(__file__).with_name("rank_watch_worker.py")
STORE_WORKER = WORKER.with_name("store_watch_worker.py")


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
        run.process.wait(400)  # its start included
        said = run.nothing_is_left_within(300)
    assert run.process.returncode == 1 and f"exit code {EXIT_CODE}" in said, said
    assert "warning: ranks have not moved for" in said and said.count("error: ranks have not moved for") == 1
    assert "they wait for rank 1; the run ends" in said and "To continue from it" in said, said
    stack = said.split("The stack of rank 1:")[-1]
    assert "rank_watch_worker.py" in stack and "time.sleep(1000)" in stack and "on_train_batch_end" in stack
    assert any(line.endswith("waiting for the others") for line in said.splitlines() if line.startswith("  rank 0 "))
    assert "they wait for rank 1" in (folder / "ranks.txt").read_text()
    checkpoint = int(find_checkpoint(folder).resolve().name.partition("-")[2].partition(".")[0])
    assert checkpoint > done, "it went on where it was"


def beat(rank, **options):
    return Beat(**({"rank": rank, "host": f"h{rank}", "pid": 7} | options))


def test_silence_counts_of_other_hosts_only():
    """A process of this host is torchrun's to watch; one that holds the interpreter's lock is silent, and not dead."""
    beats = {0: beat(0), 1: beat(1, host="h0"), 2: beat(2), 3: beat(3)}
    assert lost(beats[0], beats, {0: 0.0, 1: 99.0, 2: 20.0, 3: 40.0}, 40) == [3]


class Ended(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("silent", ["blocks", "refuses"])
def test_a_store_that_does_not_answer_is_rank_0s_host_and_no_other(silent, monkeypatch, capsys, tmp_path):
    with_patience(lambda seconds: store_goes_down(silent, seconds, monkeypatch, tmp_path), 0.5, 5.0, 60.0)
    said = capsys.readouterr().err
    assert "error: host h0, of rank 0: no answer from its store" in said and "error: rank" not in said


def store_goes_down(silent, seconds, monkeypatch, tmp_path):
    down, ended, store = threading.Event(), threading.Event(), {}

    class Store:
        def set(self, key, text):
            store[key] = text
            for rank in (0, 2):  # they beat as often as rank 1
                host = {"rank": rank, "host": f"h{rank}", "pid": rank + 10}
                store[f"beat/{rank}"] = json.dumps(json.loads(text) | host)

        def check(self, keys):
            if down.is_set():
                if silent == "refuses":
                    raise ConnectionError
                ended.wait()
            return keys[0] in store

        def multi_get(self, keys):
            return [store[key] for key in keys]

    def end(code):
        if not ended.is_set():
            ended.set()
            raise Ended(code)

    monkeypatch.setattr("callbacks.training.rank_watch.INTERVAL_S", 0.05)
    monkeypatch.setattr("callbacks.training.rank_watch.os._exit", end)
    monkeypatch.setattr("callbacks.training.rank_watch.socket.gethostname", lambda: "h1")
    loop = SimpleNamespace(total_batch_idx=0)
    trainer = SimpleNamespace(global_rank=1, world_size=3, fit_loop=loop, default_root_dir=str(tmp_path))
    watch = _Watch(RankWatch(dead_after_s=seconds), Store(), trainer)
    watch.start()
    assert not ended.wait(2 * seconds), "the store answers"
    down.set()
    assert ended.wait(300.0)
    watch.finish()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_process_that_holds_the_store_stops_answering(how, tmp_path):
    """Three ranks, each on a host of its own by name; rank 0's loses its power, or its process is gone."""
    words = [[sys.executable, str(STORE_WORKER), str(rank), str(tmp_path)] for rank in range(3)]
    ranks = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for command in words]
    try:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("watching*"))) < 3:
            assert time.monotonic() < end and all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        time.sleep(5)
        assert all(rank.poll() is None for rank in ranks)
        ranks[0].send_signal(how)
        said = [rank.communicate(timeout=300)[1] for rank in ranks[1:]]
        assert [rank.returncode for rank in ranks[1:]] == [EXIT_CODE] * 2
        assert "error: host h0, of rank 0: no answer from its store for 15 s" in said[0], said
        assert (
            "To continue from it" in said[0] and "error: rank" not in said[0] + said[1] and "error: host" not in said[1]
        )
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(("nodes", "known", "listens"), [(1, None, "127.0.0.1"), (2, "127.0.0.2", "127.0.0.2")])
def test_beats_are_heard_on_this_machine_or_where_the_other_nodes_reach_it_alone(nodes, known, listens, monkeypatch):
    """127.0.0.2 is the address by which the last rank, on another node, knows rank 0's."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")  # as rank 0 itself knows it
    strategy = SimpleNamespace(broadcast=lambda value, src=0: value if src == 0 else known)
    store = open_store(SimpleNamespace(num_nodes=nodes, world_size=4, is_global_zero=True, strategy=strategy))
    heard = [f"127.0.0.{i}" for i in range(1, 5) if not socket.socket().connect_ex((f"127.0.0.{i}", store.port))]
    assert heard == [listens]

    answers = iter([*([known] if nodes > 1 else []), store.port])
    strategy = SimpleNamespace(broadcast=lambda *_, **__: next(answers))
    other = open_store(SimpleNamespace(num_nodes=nodes, world_size=4, is_global_zero=False, strategy=strategy))
    other.set("beat", "1")
    assert store.get("beat") == b"1"


def test_an_address_that_is_none_of_this_machines_is_said(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    strategy = SimpleNamespace(broadcast=lambda value, src=0: "192.0.2.7")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(
        ValueError, match="rank 0 cannot listen on 192.0.2.7, by which another node .* MASTER_ADDR=node0"
    ):
        open_store(SimpleNamespace(num_nodes=2, world_size=4, is_global_zero=True, strategy=strategy))


def test_who_waits_for_whom():
    silent = dict.fromkeys(range(3), 0.0)
    rolling = {r: beat(r, rolling_out=True, unmoved_s=5000.0, at="rollout", stack=f"line {r}") for r in range(3)}
    assert stalled_s(rolling, silent) == 0.0, "all of them may roll out for hours"
    ranks = rolling | {1: beat(1, waiting=True, unmoved_s=700.0), 2: beat(2, waiting=True, unmoved_s=650.0)}
    assert stalled_s(ranks, silent) == 700.0
    said = stall_report("warning", "they go on.", ranks, silent)
    assert "warning: ranks have not moved for 700 s: they wait for rank 0; they go on." in said
    assert said.endswith("The stack of rank 0:\nline 0")
    together = {r: beat(r, waiting=True, unmoved_s=700.0) for r in range(2)}
    assert "all ranks wait for each other; the run ends" in stall_report("error", "the run ends.", together, silent)
    _, line = report("head", {1: ranks[1]}, silent).strip().splitlines()
    assert line == "  rank 1 (host h1, process 7), iteration 0: for 700 s at start, waiting for the others"


def seen_while(work):
    """What a thread sees twice of this one, while ``work`` blocks it until then."""
    found, done = [], concurrent.futures.Future()

    def look():
        while not ("waiter.acquire()" in (stack := main_thread()[2]) and "_base.py" in stack):  # in the future's result
            time.sleep(0.01)
        found.extend([main_thread(), main_thread()])
        done.set_result(None)

    threading.Thread(target=look).start()
    work(done)
    return found


def test_where_the_main_thread_is():
    first, second = seen_while(lambda done: done.result())
    assert first[0] == second[0] != main_thread()[0]
    assert "test_rank_watch.py" in first[1]["at"] and not first[1]["waiting"] and not first[1]["rolling_out"]
    assert "seen_while" in first[2] and "done.result()" in first[2]


def test_waiting_for_rollouts_ahead_of_the_training_is_rolling_out():
    (_, where, _), _ = seen_while(lambda done: RolloutsAhead(None, None, 1, {0: done}).settle())
    assert where["rolling_out"] and not where["waiting"] and "rollouts_ahead.py" in where["at"]


def test_stopping_before_reporting_is_refused():
    with pytest.raises(ValueError, match="stop_after_s is 5"):
        RankWatch(stop_after_s=5.0)
