"""Many trajectories at once: order, seeds, independence, streams, failures, weights, the thread."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from common.seeds import derive_seed
from experiments.registry.project import ROOT
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.rewards.qa import ExactMatchReward
from rollout.samplers.base import Hooks
from rollout.system import RolloutSystem
from rollout.tools.limits import ToolLimits
from rollout.tools.search import SearchTool
from rollout.trajectory import Fork, StopReason, Task
from tests.rollout.scripted import ENGINE_DEAD, TASK, TextEngine, ToyRetriever, in_turn, search_then_answer
from tests.rollout.scripted_engine import ScriptedEngine

SAMPLING = SamplingParams(max_new_tokens=200)

EXACT_MATCH = ExactMatchReward()


@pytest.fixture
def make_system(protocol):
    systems = []

    def make(script=search_then_answer, retriever=None, engine=None, reward=EXACT_MATCH, **options):
        environment = QuestionAnswering({"search": SearchTool(retriever or ToyRetriever())}, ToolLimits(retries=0))
        system = RolloutSystem(engine or TextEngine(protocol, script), protocol, environment, reward, **options)
        systems.append(system)
        return system

    yield make
    for system in systems:
        system.close()


def tasks(n):
    return [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(n)]


def search_by_number(context, seed):
    """As the expert, but each question has its own query and the answer shows the seed."""
    number = context.split("number ")[1].split()[0]
    if "birthplace of Mira Voss is Grey Harbor" in context:
        return f"<answer> Grey Harbor {seed} </answer>"
    return f"<search> Mira {number} </search>"


def test_order_does_not_depend_on_completion_and_seeds_not_on_company(make_system):
    hasty = make_system(search_by_number, ToyRetriever(lambda query: 0.01 * int(query.split()[1])))
    tardy = make_system(search_by_number, ToyRetriever(lambda query: 0.01 * (6 - int(query.split()[1]))))
    first = hasty.rollout(tasks(6), n=2, sampling=SAMPLING, seed=5)
    assert [(t.group, t.index) for t in first] == [(f"q{i}", j) for i in range(6) for j in range(2)]
    second = tardy.rollout(tasks(6), n=2, sampling=SAMPLING, seed=5)
    assert [t.response_ids for t in second] == [t.response_ids for t in first]
    alone = hasty.rollout(tasks(6)[4:5], n=1, sampling=SAMPLING, seed=5)
    assert alone[0].response_ids == first[8].response_ids
    other = hasty.rollout(tasks(6), n=2, sampling=SAMPLING, seed=6)
    assert len({t.answer for t in first + other}) == 24


def test_seeds_are_the_same_in_another_process():
    code = "from common.seeds import derive_seed; print(derive_seed(3, 'q1', 2, 1))"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert int(told) == derive_seed(3, "q1", 2, 1)
    assert derive_seed(1, "11") != derive_seed(11, "1") and derive_seed("1") != derive_seed(1)


def test_a_slow_tool_holds_up_only_its_own_trajectory(make_system):
    """Wall clock of a barrier would be 3 turns x the slowest; here it is the slowest trajectory."""
    release = threading.Event()

    class Gate(ToyRetriever):
        async def search(self, queries, k):
            while queries[0] == "Mira 0" and not release.is_set():
                await asyncio.sleep(0.001)
            return await super().search(queries, k)

    system = make_system(search_by_number, Gate())
    finished = []
    for trajectory in system.stream(tasks(5), sampling=SAMPLING, seed=0):
        finished.append(trajectory.group)
        if len(finished) == 4:  # all the others are through while the slow one still waits
            assert "q0" not in finished
            release.set()
    assert finished[-1] == "q0" and sorted(finished) == ["q0", "q1", "q2", "q3", "q4"]


def test_rewards_and_progress(make_system):
    seen = []
    done = make_system().rollout(tasks(3), n=2, sampling=SAMPLING, seed=0, on_progress=lambda *n: seen.append(n))
    assert [t.reward.total for t in done] == [1.0] * 6 and all(t.reward.parts["em"] == 1.0 for t in done)
    assert seen == [(i, 6) for i in range(1, 7)]


def test_concurrency_is_limited(make_system, protocol):
    engine = TextEngine(protocol, search_then_answer, latency=0.005)
    make_system(engine=engine, concurrency=3).rollout(tasks(10), sampling=SAMPLING, seed=0)
    assert engine.peak_concurrency == 3


def test_failures_are_returned_unscored_with_their_reasons(make_system):
    system = make_system(search_by_number, ToyRetriever(broken="Mira 1"))
    done = system.rollout(tasks(3), sampling=SAMPLING, seed=0)
    assert [t.stop_reason for t in done] == [StopReason.ANSWER, StopReason.INFRASTRUCTURE, StopReason.ANSWER]
    assert done[1].reward is None and done[0].reward is not None
    assert len(system.failures) == 1 and "connection refused" in system.failures[0]
    dead = make_system(lambda context, seed: ENGINE_DEAD).rollout(tasks(2), sampling=SAMPLING, seed=0)
    assert all(t.left_out for t in dead)


def test_a_bug_ends_the_rollout_with_itself(make_system):
    retriever = ToyRetriever(lambda query: 60.0)
    script = in_turn("<search> Mira </search>", ZeroDivisionError("a bug"))
    system = make_system(script, retriever)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        system.rollout(tasks(2), sampling=SAMPLING, seed=0)
    assert retriever.cancelled == ["Mira"]  # the other trajectory did not stay behind
    with pytest.raises(ValueError, match="q: the question is empty"):
        system.rollout([Task("q", " ", (), "toy")], sampling=SAMPLING, seed=0)


def test_closing_a_stream_cancels_the_rest(make_system):
    retriever = ToyRetriever(lambda query: 0.0 if query == "Mira 0" else 60.0)
    stream = make_system(search_by_number, retriever).stream(tasks(3), sampling=SAMPLING, seed=0)
    assert next(stream).group == "q0"
    stream.close()
    assert sorted(retriever.cancelled) == ["Mira 1", "Mira 2"]


def test_an_error_in_the_progress_callback_cancels_the_rest(make_system):
    def interrupted(finished, expected):
        raise KeyboardInterrupt

    retriever = ToyRetriever(lambda query: 0.0 if query == "Mira 0" else 60.0)
    system = make_system(search_by_number, retriever)
    with pytest.raises(KeyboardInterrupt):
        system.rollout(tasks(3), sampling=SAMPLING, seed=0, on_progress=interrupted)
    assert sorted(retriever.cancelled) == ["Mira 1", "Mira 2"]


def test_a_task_that_occurs_twice_makes_two_groups(make_system):
    done = make_system().rollout([TASK, TASK], n=2, sampling=SAMPLING, seed=0)
    assert [(t.group, t.index) for t in done] == [("q1", 0), ("q1", 1), ("q1#2", 0), ("q1#2", 1)]


class OneFork:
    """A branching sampler of the simplest kind: one root; the others fork from it where it last began a turn."""

    async def sample(self, group, n):
        children = []

        async def on_turn(state, generation):
            if len(state.turns) == 2:
                for index in range(1, n):
                    run = group.run(index, start=state, at=state.turns[-1].start)
                    children.append(asyncio.ensure_future(run))

        root = await group.run(0, hooks=Hooks(on_turn=on_turn))
        return [root, *[await child for child in children]]


def test_a_branching_sampler_fits_behind_the_seam(make_system):
    retriever = ToyRetriever()
    done = make_system(search_by_number, retriever, sampler=OneFork()).rollout(tasks(2), n=4, sampling=SAMPLING, seed=0)
    assert [(t.group, t.index) for t in done] == [(f"q{i}", j) for i in range(2) for j in range(4)]
    at = done[0].turns[1].start
    assert [t.fork for t in done[:4]] == [None] + [Fork(0, at)] * 3
    assert len({t.answer for t in done[:4]}) == 4  # own seeds
    assert all(t.reward is not None for t in done) and len(retriever.queries) == 2  # one search per prompt


class StrictEngine(TextEngine):
    """Refuses unknown names as the real engines do."""

    async def load_files(self, files, version, between_steps=False):
        if "unknown" in files.shapes():
            raise ValueError("no parameter named unknown")
        self.weights = dict(files.tensors())
        self.policy_version = version


def test_weights_are_produced_in_the_callers_thread_one_at_a_time(make_system, protocol):
    engine = StrictEngine(protocol, search_then_answer)
    system = make_system(engine=engine)
    assert system.policy_version == 0
    buffer, threads = torch.zeros(2), []

    def gathered():  # each tensor lives only until the next is asked for, as under ZeRO-3
        for value in range(5):
            threads.append(threading.current_thread())
            buffer.fill_(value)
            yield f"layer.{value}", buffer
            buffer.fill_(-1)

    system.load_weights(gathered(), version=3)
    assert [tensor.tolist() for tensor in engine.weights.values()] == [[float(v)] * 2 for v in range(5)]
    assert set(threads) == {threading.current_thread()}
    assert system.policy_version == 3
    [trajectory] = system.rollout([TASK], sampling=SAMPLING, seed=0)
    assert trajectory.policy_versions == (3, 3)


def test_refused_weights_change_nothing_but_are_gathered_to_the_end(make_system, protocol):
    system = make_system(engine=StrictEngine(protocol, search_then_answer))
    made = []

    def gathered():
        for name in ("a", "unknown", "b", "c"):
            made.append(name)
            yield name, torch.zeros(1)

    with pytest.raises(ValueError, match="no parameter named unknown"):
        system.load_weights(gathered(), version=1)
    assert made == ["a", "unknown", "b", "c"] and system.policy_version == 0

    def failing():
        yield "a", torch.zeros(1)
        raise OSError("gather failed")

    with pytest.raises(OSError, match="gather failed"):
        system.load_weights(failing(), version=1)
    assert system.policy_version == 0
    assert system.rollout([TASK], sampling=SAMPLING, seed=0)[0].reward.total == 1.0  # still usable


def test_close_ends_the_thread_and_closes_what_it_was_given(make_system, protocol):
    retriever, before = ToyRetriever(), set(threading.enumerate())
    system = make_system(retriever=retriever)
    system.close()  # never started: nothing to do
    assert retriever.closed == 0
    system.rollout([TASK], sampling=SAMPLING, seed=0)
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "rollout")
    system.close()
    system.close()
    assert retriever.closed == 1 and not thread.is_alive()
    assert system.rollout([TASK], sampling=SAMPLING, seed=0)[0].answer == "Grey Harbor"  # starts again


def test_ctrl_c_ends_a_wait_for_trajectories():
    """In a process of its own: others may have replaced the handler that polars installs when it is imported."""
    code = (
        "import polars, queue\nfrom common.async_calls import EventLoopThread\n"
        "thread = EventLoopThread('rollout')\nprint('waiting', flush=True)\nqueue.SimpleQueue().get()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"waiting\n"
        time.sleep(2)  # an earlier signal would end the process before it waits
        process.send_signal(signal.SIGINT)
        process.wait(300)
        assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()


def test_a_restart_under_contention_begins_at_version_0(protocol):
    limits = ToolLimits(retries=0, concurrency=1)
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever(lambda query: 0.005))}, limits)
    engine = StrictEngine(protocol, search_then_answer)
    system = RolloutSystem(engine, protocol, environment, ExactMatchReward())
    try:
        for version in (3, 5):
            assert system.policy_version == 0
            system.load_weights([("a", torch.zeros(1))], version)
            done = system.rollout(tasks(4), sampling=SAMPLING, seed=0)
            assert [t.answer for t in done] == ["Grey Harbor"] * 4 and system.policy_version == version
            system.close()
        assert system.policy_version == 0
    finally:
        system.close()


def test_tools_start_before_the_engine_and_a_refusal_stops_everything(protocol):
    """A sandbox that is not tight is told before a model is loaded."""
    order = []

    class Engine(ScriptedEngine):
        async def start(self):
            order.append("engine")
            await super().start()

    class Untight:
        name = "search"

        async def start(self):
            order.append("tool")
            raise RuntimeError("not tight")

        async def call(self, arguments):
            raise AssertionError("never called")

        async def close(self):
            return None

    system = RolloutSystem(Engine([], protocol.tokenizer), protocol, QuestionAnswering({"search": Untight()}), None)
    try:
        with pytest.raises(RuntimeError, match="not tight"):
            system.start()
    finally:
        system.close()
    assert order == ["tool"]


def test_a_retriever_that_learns_is_none_for_the_students_prompt(protocol):
    from rollout.skills.bandit import UCB
    from rollout.skills.injection import Skills

    with pytest.raises(ValueError, match="UCB learns from rewards"):
        RolloutSystem(TextEngine(protocol, search_then_answer), protocol, None, skills=Skills("household_tiny", UCB()))
