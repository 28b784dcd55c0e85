"""Limits around tools: deadlines that cancel, retries, the queue, the cap, the shared cache."""

import asyncio
import random

import pytest

from rollout.environments.question_answering import QuestionAnswering
from rollout.tools.limits import LimitedTool, ToolLimits
from rollout.trajectory import (
    Action,
    ActionKind,
    CallOutcome,
    InfrastructureError,
    PermanentFailure,
    ToolCall,
    ToolRequest,
    ToolResult,
)
from tests.rollout import virtual_time
from tests.rollout.scripted import TASK


class Probe:
    """A tool that records what happens to it. ``do`` runs in each call, with the number of the attempt from 1."""

    name = "probe"

    def __init__(self, do=None):
        self.do, self.attempts, self.cancelled, self.running, self.most_running = do, 0, 0, 0, 0

    async def call(self, arguments):
        self.attempts += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return (await self.do(self.attempts)) if self.do else ToolResult(str(arguments), CallOutcome.OK)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def close(self):
        self.closed = True


def _raise(error):
    raise error


async def forever(attempt):
    await asyncio.Event().wait()


def test_what_failed_for_good_is_not_tried_again():
    async def refused(attempt):
        raise PermanentFailure("no such key") if attempt == 2 else InfrastructureError("busy")

    probe = Probe(refused)
    with pytest.raises(PermanentFailure, match="no such key"):
        asyncio.run(LimitedTool(probe, ToolLimits(retries=5, backoff_s=0)).call({}))
    assert probe.attempts == 2


def test_a_deadline_cancels_and_is_infrastructure_or_a_result():
    slow = Probe(forever)
    with pytest.raises(InfrastructureError, match="no result within 0.02 s"):
        asyncio.run(LimitedTool(slow, ToolLimits(timeout_s=0.02, retries=1, backoff_s=0)).call({}))
    assert (slow.attempts, slow.cancelled, slow.running) == (2, 2, 0)
    own = Probe(forever)
    limits = ToolLimits(timeout_s=0.02, retries=5, timeout_is_infrastructure=False)
    result = asyncio.run(LimitedTool(own, limits).call({}))
    assert (result.outcome, own.attempts, own.cancelled) == (CallOutcome.TIMEOUT, 1, 1)


def test_retries_after_infrastructure_errors_only():
    async def second_time_lucky(attempt):
        if attempt < 3:
            raise InfrastructureError("down")
        return ToolResult("ok", CallOutcome.OK)

    probe = Probe(second_time_lucky)
    assert asyncio.run(LimitedTool(probe, ToolLimits(retries=2, backoff_s=0)).call({})).text == "ok"
    with pytest.raises(InfrastructureError, match="down"):
        asyncio.run(LimitedTool(Probe(second_time_lucky), ToolLimits(retries=1, backoff_s=0)).call({}))

    async def wrong_arguments(attempt):
        return ToolResult("bad", CallOutcome.ERROR)

    probe = Probe(wrong_arguments)
    asyncio.run(LimitedTool(probe, ToolLimits(retries=5, backoff_s=0)).call({}))
    assert probe.attempts == 1


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (lambda: _raise(ValueError("no such city")), "The tool probe failed: ValueError: no such city"),
        (lambda: _raise(LookupError("a\nb \ud83d")), "The tool probe failed: LookupError: a b \ufffd"),
        (lambda: _raise(asyncio.CancelledError("its own")), "The tool probe failed: CancelledError: its own"),
        (
            lambda: ToolResult(7, CallOutcome.OK),
            "The tool probe failed: TypeError: the text of a ToolResult is int; expected str",
        ),
        *[
            (
                lambda value=value: value,
                f"The tool probe failed: TypeError: the result is {type(value).__name__}; "
                "expected a text or a ToolResult",
            )
            for value in (None, b"x", 7, 1.5, {"text": "x"}, ["x"])
        ],
    ],
)
@pytest.mark.parametrize("awaited", [True, False])
def test_what_a_tool_of_your_own_does_wrong_is_an_error_that_the_model_reads(do, text, awaited, caplog):
    class Own:
        name = "probe"

        def call(self, arguments):
            async def called():
                return do()

            return called() if awaited else do()

    tool = LimitedTool(Own(), ToolLimits(retries=5, backoff_s=0, cache_size=2))
    results = [asyncio.run(tool.call({})) for _ in range(2)]
    assert {(result.outcome, result.text) for result in results} == {(CallOutcome.ERROR, text)}
    assert len(caplog.records) == 1, "logged once, with its traceback"
    assert "Traceback (most recent call last)" in caplog.messages[0] and caplog.messages[0].encode()  # a log is UTF-8


@pytest.mark.parametrize(("text", "outcome"), [("Oslo", CallOutcome.OK), (" \n", CallOutcome.EMPTY)])
def test_a_tool_may_return_a_text(text, outcome):
    async def answer(attempt):
        return text

    assert asyncio.run(LimitedTool(Probe(answer), ToolLimits()).call({})) == ToolResult(text, outcome)


def test_ctrl_c_and_a_cancellation_are_no_fault_of_the_tool():
    async def interrupted(attempt):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(LimitedTool(Probe(interrupted), ToolLimits()).call({}))

    async def cancelled():
        work = asyncio.create_task(LimitedTool(Probe(forever), ToolLimits()).call({}))
        await asyncio.sleep(0)
        work.cancel()
        await work

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_back_off_doubles_with_jitter(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    async def down(attempt):
        raise InfrastructureError("down")

    monkeypatch.setattr("rollout.tools.limits.asyncio.sleep", sleep)
    state = random.getstate()
    for _ in range(50):
        with pytest.raises(InfrastructureError):
            asyncio.run(LimitedTool(Probe(down), ToolLimits(retries=3, backoff_s=0.5)).call({}))
    assert random.getstate() == state  # the run's own draws are not moved
    for retry, base in enumerate((0.5, 1.0, 2.0)):
        factors = [pause / base for pause in pauses[retry::3]]
        assert 0.5 <= min(factors) < 0.8 and 1.2 < max(factors) <= 1.5


def test_concurrency_is_limited_and_waiting_does_not_count_as_working():
    async def work(attempt):
        await asyncio.sleep(0.4)
        return ToolResult("ok", CallOutcome.OK)

    async def many(tool):
        return await asyncio.gather(*(tool.call({"i": i}) for i in range(8)))

    probe = Probe(work)  # four rounds of 0.4 s: the last ones wait for longer than their deadline of 1.1 s
    results = virtual_time.run(many(LimitedTool(probe, ToolLimits(concurrency=2, timeout_s=1.1, retries=0))))
    assert [result.outcome for result in results] == [CallOutcome.OK] * 8 and probe.most_running == 2


def test_a_second_loop_at_the_same_time_is_refused():
    async def in_another_thread():
        await tool.call({})
        with pytest.raises(RuntimeError, match="tool probe serves one event loop at a time"):
            await asyncio.to_thread(asyncio.run, tool.call({}))

    tool = LimitedTool(Probe(), ToolLimits())
    asyncio.run(in_another_thread())


@pytest.mark.parametrize(
    ("outcome", "limit", "text"),
    [
        (CallOutcome.OK, 16, "0123456789\n[...]"),
        (CallOutcome.ERROR, 16, "0123\n[...]\nvwxyz"),
        (CallOutcome.ERROR, 8, "\n[...]\nz"),
        (CallOutcome.ERROR, 7, "\n[...]\n"),
    ],
)
def test_what_is_cut_off(outcome, limit, text):
    """Results are best at their head; of an error the reason comes last."""

    async def long(attempt):
        return ToolResult("0123456789abcdefghijklmnopqrstuvwxyz", outcome)

    assert asyncio.run(LimitedTool(Probe(long), ToolLimits(max_characters=limit)).call({})).text == text


def test_cache_shares_running_and_finished_calls_and_drops_the_oldest():
    async def work(attempt):
        await asyncio.sleep(0.01)
        return ToolResult(str(attempt), CallOutcome.OK)

    async def scenario():
        probe = Probe(work)
        tool = LimitedTool(probe, ToolLimits(cache_size=2))
        same = [tool.call({"q": "a", "k": 1}) for _ in range(5)] + [tool.call({"k": 1, "q": "a"})]
        at_once = await asyncio.gather(*same)
        assert [result.text for result in at_once] == ["1"] * 6
        await tool.call({"q": "b"})
        await tool.call({"q": "a", "k": 1})  # a is now the more recent one
        await tool.call({"q": "c"})
        assert probe.attempts == 3
        await tool.call({"q": "a", "k": 1})
        assert probe.attempts == 3
        await tool.call({"q": "b"})
        assert probe.attempts == 4

    asyncio.run(scenario())


def test_cache_keeps_no_failures():
    async def first_fails(attempt):
        if attempt == 1:
            raise InfrastructureError("down")
        return ToolResult("bad", CallOutcome.ERROR) if attempt == 2 else ToolResult("ok", CallOutcome.OK)

    async def scenario():
        tool = LimitedTool(Probe(first_fails), ToolLimits(cache_size=2, retries=0))
        with pytest.raises(InfrastructureError):
            await tool.call({})
        assert [(await tool.call({})).text for _ in range(3)] == ["bad", "ok", "ok"]

    asyncio.run(scenario())


def test_cancelling_one_waiter_leaves_the_others_and_the_last_one_cancels_the_work():
    async def scenario():
        probe = Probe(forever)
        tool = LimitedTool(probe, ToolLimits(cache_size=2))
        first, second = (asyncio.create_task(tool.call({})) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (probe.attempts, probe.running) == (1, 1)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await asyncio.sleep(0)
        assert (probe.cancelled, probe.running) == (1, 0)
        third = asyncio.create_task(tool.call({}))  # does not join the cancelled execution
        await asyncio.sleep(0.01)
        assert probe.attempts == 2
        third.cancel()

    asyncio.run(scenario())


def test_several_calls_of_one_turn_run_at_once_and_are_counted_in_order():
    async def work(attempt):
        await asyncio.sleep(0.02 / attempt)  # later calls are faster
        return ToolResult(str(attempt), CallOutcome.OK)

    async def scenario():
        probe = Probe(work)
        environment = QuestionAnswering({"probe": probe}, ToolLimits(max_calls=2))(TASK)
        requests = [ToolRequest(name, {}) for name in ("probe", "unknown", "probe", "probe")]
        step = await environment.step(Action(ActionKind.CALL, tuple(requests)))
        assert [step.results[i].text for i in (0, 2)] == ["1", "2"] and probe.most_running == 2
        ok, refused = CallOutcome.OK, CallOutcome.REFUSED
        assert [result.outcome for result in step.results] == [ok, refused, ok, refused]
        assert [latency > 0 for latency in step.latencies_s] == [True, False, True, False]

    asyncio.run(scenario())


def test_calls_of_all_tools_together_are_limited():
    """Two tools, three calls in all; an unknown tool, and a call that the tool itself declines, use none of them."""

    async def declines(attempt):
        return ToolResult("no", CallOutcome.REFUSED if attempt == 1 else CallOutcome.OK)

    async def scenario():
        factory = QuestionAnswering({"a": Probe(), "b": Probe(declines)}, ToolLimits(max_calls=2), max_calls=3)
        environment = factory(TASK)
        outcomes = []
        for name in ("b", "unknown", "a", "a", "a", "b", "b"):
            step = await environment.step(Action(ActionKind.CALL, (ToolRequest(name, {}),)))
            outcomes.append(step.results[0])
        ok, refused = CallOutcome.OK, CallOutcome.REFUSED
        assert [result.outcome for result in outcomes] == [refused, refused, ok, ok, refused, ok, refused]
        assert outcomes[4].text == "No further call of a is allowed (limit: 2)."
        assert outcomes[6].text == "No further tool call is allowed (limit: 3)."

    asyncio.run(scenario())


def test_a_fork_goes_on_counting_where_its_parent_was():
    """The parent executed two calls before the fork, and was refused one; the child has one left."""

    def happened(name, outcome):
        return ToolCall(0, ToolRequest(name, {}), ToolResult("x", outcome), 0.1)

    calls = [happened("a", CallOutcome.OK), happened("b", CallOutcome.TIMEOUT), happened("a", CallOutcome.REFUSED)]

    async def scenario():
        child = QuestionAnswering({"a": Probe(), "b": Probe()}, max_calls=3)(TASK)
        await child.resume((), calls)
        requests = tuple(ToolRequest(name, {}) for name in ("b", "a"))
        step = await child.step(Action(ActionKind.CALL, requests))
        assert [result.outcome for result in step.results] == [CallOutcome.OK, CallOutcome.REFUSED]

    asyncio.run(scenario())
