import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from experiments.registry.project import ROOT
from rollout.rewards.deadline import DeadlineExceeded, DeadlinePool, WorkerDied
from rollout.trajectory import InfrastructureError

WORK = "tests.rollout.rewards.deadline_functions.work"
LONG = 600.0  # seconds: a deadline that is never met


@pytest.fixture
def pool():
    pool = DeadlinePool(WORK, workers=1)
    yield pool
    pool.close()


def gone(pid: int, within: float = 300.0) -> bool:
    """Whether the process has ended; a zombie has."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_one_process_serves_call_after_call_and_ends_with_the_pool(pool):
    pid = pool.call("pid", timeout_s=LONG)
    assert pid != os.getpid()
    assert pool.call("value", 2.5, timeout_s=LONG) == 2.5
    assert pool.call("pid", timeout_s=LONG) == pid
    pool.close()
    assert gone(pid)
    pool.close()
    assert pool.call("pid", timeout_s=LONG) != pid, "a later call starts another"


@pytest.mark.parametrize("endless", ["sleep", "power"])
def test_the_deadline_kills_and_the_process_is_replaced(pool, endless):
    pid = pool.call("pid", timeout_s=LONG)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="was not finished in 0.3 s"):
        pool.call(endless, LONG, timeout_s=0.3)
    assert time.monotonic() - began < LONG / 2
    assert gone(pid)
    assert pool.call("pid", timeout_s=LONG) != pid


def test_failures_of_the_function_and_of_its_process(pool):
    pid = pool.call("pid", timeout_s=LONG)
    with pytest.raises(KeyError, match="no 7"):
        pool.call("raise", 7, timeout_s=LONG)
    with pytest.raises(TimeoutError, match="a server was silent"):  # the function's own
        pool.call("time out", timeout_s=LONG)
    with pytest.raises(MemoryError):
        pool.call("memory", 4e9, timeout_s=LONG)  # bytes, of an address space of 1 GiB
    assert pool.call("pid", timeout_s=LONG) == pid, "an exception does not cost the process"
    with pytest.raises(WorkerDied, match="exit code -9"):
        pool.call("die", timeout_s=LONG)
    idle = pool.call("pid", timeout_s=LONG)
    assert idle != pid
    os.kill(idle, signal.SIGKILL)
    assert gone(idle)
    assert pool.call("value", 1, timeout_s=LONG) == 1


def test_a_broken_pool_is_stopped_before_it_is_replaced(monkeypatch):
    pool = DeadlinePool(WORK, workers=2)
    try:
        pid = pool.call("pid", timeout_s=LONG)
        broken, stopped = pool._pool, []
        stop, schedule = broken.stop, broken.schedule

        def breaks(*arguments, **options):
            """After it was asked whether it is active."""
            broken._pool_manager.handle_broken_pool(BrokenProcessPool("all workers expired"))
            return schedule(*arguments, **options)

        monkeypatch.setattr(broken, "schedule", breaks)
        monkeypatch.setattr(broken, "stop", lambda: (stopped.append(True), stop()))
        other = pool.call("pid", timeout_s=LONG)
        assert other != pid and stopped and gone(pid) and pool._pool is not broken
    finally:
        pool.close()


def test_a_call_that_a_breaking_pool_forgets_is_made_again_before_its_deadline(pool, monkeypatch):
    pid = pool.call("pid", timeout_s=LONG)
    broken, began = pool._pool, time.monotonic()

    def forgets(*arguments, **options):
        broken._pool_manager.handle_broken_pool(BrokenProcessPool("all workers expired"))
        return Future()

    monkeypatch.setattr(broken, "schedule", forgets)
    assert pool.call("pid", timeout_s=LONG) != pid
    assert time.monotonic() - began < LONG / 2


@pytest.mark.slow
def test_calls_wait_for_a_process_without_losing_their_time():
    pool = DeadlinePool(WORK, workers=2)
    pids, late = [], []

    def call():
        try:
            pool.call("sleep", 0.2, timeout_s=60.0)
            pids.append(pool.call("pid", timeout_s=LONG))
        except DeadlineExceeded as error:
            late.append(error)

    try:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert late == [] and len(pids) == 8 and 1 <= len(set(pids)) <= 2
    finally:
        pool.close()


def test_closing_waits_for_a_call_in_flight(pool):
    pid = pool.call("pid", timeout_s=LONG)
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(pool.call("sleep", 0.5, timeout_s=LONG)))
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(timeout=LONG / 2)
    assert outcome == [0.5] and gone(pid)


def test_the_process_is_no_rank_of_the_trainer(pool, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pool.call("environment", timeout_s=LONG) == []


def test_a_function_that_is_not_there():
    pool = DeadlinePool("rollout.rewards.scoring.no_such")
    with pytest.raises(InfrastructureError, match="no_such failed at start"):
        pool.call(timeout_s=LONG)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "killed idle", "killed busy"])
def test_no_process_outlives_its_parent(end):
    busy = 'pool.call("sleep", 60, timeout_s=1.0)' if end == "killed busy" else "time.sleep(60)"
    code = (
        f"import sys, time\nfrom rollout.rewards.deadline import DeadlinePool\npool = DeadlinePool({WORK!r})\n"
        'print(pool.call("pid", timeout_s=600), flush=True)\n'
        f"{'pass' if end == 'return' else busy}\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    try:
        if end == "return":
            assert parent.wait(timeout=300) == 0
        else:
            parent.kill()
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
