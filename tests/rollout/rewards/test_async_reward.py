"""Rewards in the event loop: when they start and end, what they wait for, and what a failing service costs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.rewards.base import Scorer
from rollout.rewards.reasoning import ReasoningReward
from rollout.system import RolloutSystem
from rollout.tools.python.local import LocalSandbox
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError, Reward, StopReason, Task, Trajectory
from tests.rollout.scripted import TextEngine, ToyRetriever, search_then_answer

SAMPLING = SamplingParams(max_new_tokens=200)
TASKS = [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(4)]


class Waiting:
    """Scores 0.5 once ``together`` trajectories wait for it at the same time, in the loop."""

    def __init__(self, together: int = 1, fails: tuple[str, ...] = (), order: list | None = None) -> None:
        self.together, self.fails, self.order = together, fails, [] if order is None else order
        self.thread, self.waiting, self.all_there = None, 0, None

    async def start(self) -> None:
        self.order.append("reward starts")
        self.waiting, self.all_there = 0, asyncio.Event()

    async def score_async(self, trajectory: Trajectory) -> Reward:
        self.thread = threading.current_thread().name
        if trajectory.task.id in self.fails:
            raise InfrastructureError("the sandbox is down")
        self.waiting += 1
        if self.waiting == self.together:
            self.all_there.set()
        await self.all_there.wait()
        return Reward(0.5, {"acc": 1.0})

    async def close(self) -> None:
        self.order.append("reward closes")


class Engine(TextEngine):
    def __init__(self, protocol, order) -> None:
        super().__init__(protocol, search_then_answer)
        self.order = order

    async def start(self):
        self.order.append("engine starts")
        await super().start()

    async def close(self):
        self.order.append("engine closes")
        await super().close()


class Tool(SearchTool):
    order: list

    async def start(self):
        self.order.append("tool starts")

    async def close(self):
        self.order.append("tool closes")
        if "tool fails" in self.order:
            raise OSError("cannot close")


@pytest.fixture
def make_system(protocol):
    systems = []

    def make(reward, order=None):
        tool = Tool(ToyRetriever())
        tool.order = [] if order is None else order
        engine = Engine(protocol, tool.order)
        systems.append(RolloutSystem(engine, protocol, QuestionAnswering({"search": tool}), reward))
        return systems[-1]

    yield make
    for system in systems:
        system.close()


def test_they_are_awaited_in_the_loop_many_at_once(make_system):
    reward = Waiting(together=4)  # one after the other they would wait for ever
    done = make_system(reward).rollout(TASKS, sampling=SAMPLING, seed=0)
    assert [t.reward for t in done] == [Reward(0.5, {"acc": 1.0})] * 4
    assert reward.thread == "rollout"


def test_an_end_of_iteration_in_a_reward_ends_the_rollout(make_system):
    class Searching:
        def score(self, trajectory):
            return next(iter(()))

    with pytest.raises(Exception, match="StopIteration"):  # a future cannot hold it: the rollout would wait for ever
        make_system(Searching()).rollout(TASKS[:1], sampling=SAMPLING, seed=0)


def test_start_and_end(make_system):
    order = []
    system = make_system(Waiting(order=order), order)
    for _ in range(2):
        system.rollout(TASKS[:1], sampling=SAMPLING, seed=0)
        system.close()
        starts = ["tool starts", "reward starts", "engine starts"]
        assert order == [*starts, "tool closes", "reward closes", "engine closes"]  # and then all of it again
        order.clear()


def test_a_start_that_fails_comes_before_the_engine(make_system):
    class Untight(Waiting):
        async def start(self):
            raise RuntimeError("not tight")

    order = []
    with pytest.raises(RuntimeError, match="not tight"):
        make_system(Untight(), order).start()
    assert order == ["tool starts"]


class BrokenScorer:
    def score(self, trajectory) -> Reward:
        if trajectory.task.id == "q1":
            raise InfrastructureError("the sandbox is down")
        return Reward(0.5, {"acc": 1.0})


@pytest.mark.parametrize("reward", [Waiting(together=3, fails=("q1",)), BrokenScorer()], ids=["async", "sync"])
def test_a_failing_service_leaves_the_trajectory_out_and_is_no_score(make_system, reward):
    system = make_system(reward)
    delivered = list(system.stream(TASKS, sampling=SAMPLING, seed=0))
    failed = [t for t in delivered if t.left_out]
    assert [t.task.id for t in failed] == ["q1"] and failed[0].stop_reason is StopReason.INFRASTRUCTURE
    assert failed[0].reward is None and failed[0].answer == "Grey Harbor"
    assert sorted(t.task.id for t in delivered if t.reward == Reward(0.5, {"acc": 1.0})) == ["q0", "q2", "q3"]
    assert system.failures == ("the sandbox is down",)


def test_a_bug_in_one_ends_the_rollout(make_system):
    class Bug(Waiting):
        async def score_async(self, trajectory):
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        make_system(Bug()).rollout(TASKS, sampling=SAMPLING, seed=0)


def test_leaving_early_cancels_what_is_being_scored(make_system):
    class Endless(Waiting):
        cancelled = 0

        async def score_async(self, trajectory):
            if trajectory.task.id == "q0":
                await self.all_there.wait()
                return Reward(0.0)
            try:
                await super().score_async(trajectory)  # until the other two are here
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    reward = Endless(together=3)
    stream = make_system(reward).stream(TASKS, sampling=SAMPLING, seed=0)
    assert next(stream).task.id == "q0"
    stream.close()
    assert reward.cancelled == 3


def test_programs_are_tested_in_the_systems_loop_and_again_in_a_new_one(make_system, model_dir):
    """The whole way: sampled text, its program, a sandbox, a reward."""
    tests = {"inputs": ["2", "3", "0", "1"], "outputs": ["4", "6", "0", "2"], "fn_name": None}
    task = Task("double", "Double a number.", (), "toy", metadata={"ability": "code", "tests": tests})
    system = make_system(ReasoningReward(str(model_dir), LocalSandbox(timeout_s=30)))
    for program, total in (("print(2 * int(input()))", 1.0), ("print(int(input()) ** 2)", 0.5)):
        text = f"<think> easy </think>\n```python\n{program}\n```\n<answer> see above </answer>"
        system.engine.script = lambda context, seed, text=text: text
        done = system.rollout([task], n=3, sampling=SAMPLING, seed=0)
        assert [t.reward.total for t in done] == [total] * 3
        assert [t.reward.parts["acc"] for t in done] == [float(total == 1.0)] * 3
        system.close()


def test_a_thread_scores_what_waits_and_a_slow_reward_holds_up_no_other():
    """The first trajectory waits, in its thread, for all others but the failing one, of which there are many."""
    others = threading.Semaphore(0)

    class InThread:
        def score(self, trajectory):
            assert threading.current_thread() is not threading.main_thread()
            if trajectory == 0:
                assert all(others.acquire(timeout=30) for _ in range(98))
            elif trajectory == 1:
                raise InfrastructureError("the service is down")
            else:
                others.release()
            return Reward(float(trajectory))

    async def score_all():
        scorer = Scorer(InThread())
        first = await asyncio.gather(*(scorer.score(i) for i in range(100)), return_exceptions=True)
        return first, await scorer.score(7)

    scored, again = asyncio.run(score_all())
    assert isinstance(scored.pop(1), InfrastructureError) and again == Reward(7.0)
    assert scored == [Reward(float(i)) for i in range(100) if i != 1]
