"""Python functions as programs: threads, decorators, time, and functions that do not stop."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import subprocess
import sys
import threading
import time

import httpx
import pytest

from experiments.registry.project import ROOT
from rollout.programs.functions import PythonProgram
from rollout.trajectory import StopReason
from tests.rollout.programs.playing import END, SAMPLING, TASK, play, system_of, user

YES = lambda text, n: f"yes{END}"  # noqa: E731
HERE = "tests.rollout.programs.test_functions"
release = threading.Event()


def ordinary(task, model):
    with httpx.Client(base_url=model.base_url) as api:
        said = api.post("/chat/completions", json={"messages": [user(task.question)]}).json()
    return {"answer": said["choices"][0]["message"]["content"], "reward": 1}


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    del wrapper.__wrapped__
    return wrapper


@decorated
async def hidden_coroutine(task, model):
    await model.chat(messages=[user("q")])
    return 0.5


def stuck(task, model):
    release.wait(60)


def brief(task, model):
    time.sleep(0.2)
    return 1.0


async def insistent(task, model):
    while True:
        try:
            await model.chat(messages=[user("q")])
        except Exception:
            continue


async def stubborn(task, model):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)


def listing(task, model):
    return [1.0]


def exits(task, model):
    raise SystemExit(3)


def test_an_ordinary_function_runs_in_a_thread(protocol):
    trajectory = play(system_of(protocol, YES, PythonProgram(f"{HERE}.ordinary")))
    assert trajectory.answer == "yes" and trajectory.reward.total == 1.0 and len(trajectory.turns) == 1


def test_a_coroutine_behind_a_decorator_is_awaited(protocol):
    assert play(system_of(protocol, YES, PythonProgram(f"{HERE}.hidden_coroutine"))).reward.total == 0.5


@pytest.mark.parametrize(
    "name, said", [("listing", "it returned list; expected a number"), ("exits", "exits raised SystemExit: 3")]
)
def test_what_is_no_result_is_a_failure_of_the_program(name, said, protocol, caplog):
    trajectory = play(system_of(protocol, YES, PythonProgram(f"{HERE}.{name}", failure_reward=-1.0)))
    assert trajectory.stop_reason is StopReason.PROGRAM_FAILED and trajectory.reward.total == -1.0


@pytest.mark.parametrize("name", ["stuck", "insistent"])
def test_a_function_whose_time_is_over_costs_its_rollout_alone(name, protocol):
    release.clear()
    try:
        program = PythonProgram(f"{HERE}.{name}", timeout_s=1.0, failure_reward=0.0)
        trajectory = play(system_of(protocol, YES, program, max_turns=2))
    finally:
        release.set()
    assert trajectory.stop_reason in (StopReason.PROGRAM_TIMEOUT, StopReason.MAX_TURNS)


def test_a_coroutine_that_swallows_its_cancellation_is_left_behind(protocol, monkeypatch):
    monkeypatch.setattr("rollout.programs.loop.LEAVE_S", 0.2)
    program = PythonProgram(f"{HERE}.stubborn", timeout_s=None)
    system = system_of(protocol, lambda text, n: f"yes{END}", program)
    stream = system.stream([TASK], sampling=SAMPLING, seed=1)
    stopper = threading.Timer(0.5, lambda: system._running_thread.call(cancel_all))

    def cancel_all():
        for task in asyncio.all_tasks(system._running_thread.loop):
            task.cancel()

    stopper.start()
    with pytest.raises(RuntimeError, match="closed while trajectories were in flight"):
        list(stream)
    system.close()


def test_waiting_for_a_thread_is_not_the_programs_time(protocol):

    program = PythonProgram(f"{HERE}.brief", timeout_s=5.0, threads=1)
    system = system_of(protocol, YES, program)
    try:
        made = system.rollout([dataclasses.replace(TASK, id=str(n)) for n in range(6)], sampling=SAMPLING, seed=1)
    finally:
        system.close()
    assert [t.stop_reason for t in made] == [StopReason.PROGRAM_DONE] * 6


def test_a_stuck_function_does_not_keep_the_process(tmp_path):
    program = (
        "import asyncio, time\n"
        "from rollout.programs.functions import _in_thread\n"
        "async def main():\n"
        "    _in_thread(time.sleep, 600)\n"
        "    await asyncio.sleep(0.1)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120, check=True)
