"""What becomes of trajectories in flight when new weights arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
import time

import pytest
import torch

from rollout.engines.base import Generation, SamplingParams
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.weights.files import WeightFiles
from rollout.engines.weights.push import push
from rollout.environments.question_answering import QuestionAnswering
from rollout.loop.prompt_group import Admission
from rollout.loop.running_trajectory import RunningTrajectory, TurnGenerator
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.rewards.qa import ExactMatchReward
from rollout.storage import load_trajectories, save_trajectories
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import Action, ActionKind, InfrastructureError, StopReason, Task, split_turns
from tests.conftest import make_model_dir
from tests.rollout.engines.plain_backend import PlainEngine
from tests.rollout.scripted import TASK, TextEngine, ToyRetriever, search_then_answer
from tests.rollout.scripted_engine import ScriptedEngine

CALL = Action(ActionKind.CALL)


def tasks(n):
    return [dataclasses.replace(TASK, id=f"q{i}") for i in range(n)]


def generation(n, version, *runs):
    return Generation(tuple(range(n)), (-0.5,) * n, "stop", version, version_runs=runs)


def test_versions_of_turns_that_were_opened_forked_and_cut(tmp_path):
    state = RunningTrajectory(TASK, "g", 0, prompt_ids=[1])
    state.add_turn(generation(2, 3), CALL)
    state.add_observation([7, 7], False)
    state.open(generation(3, 4, (3, 1), (4, 2)))
    state.add_turn(generation(3, 5, (4, 1), (5, 2)), CALL)
    whole = state.finish(StopReason.MAX_TURNS, 0.0)
    assert [turn.versions for turn in whole.turns] == [((3, 2),), ((3, 1), (4, 3), (5, 2))]
    assert whole.turns[0].version_runs == ()
    assert whole.token_versions == (3, 3, -1, -1, 3, 4, 4, 4, 5, 5) and whole.policy_versions == (3, 5)
    save_trajectories(tmp_path / "t.parquet", [whole])
    assert load_trajectories(tmp_path / "t.parquet") == [whole]

    branch = RunningTrajectory(TASK, "g", 1)
    branch.continue_from(whole, 7)  # in the middle of the second turn, three tokens of which it takes over
    branch.add_turn(generation(2, 6), CALL)
    done = branch.finish(StopReason.MAX_TURNS, 0.0)
    assert done.token_versions == (3, 3, -1, -1, 3, 4, 4, 6, 6)
    rows = split_turns(whole.replace(turns=tuple(dataclasses.replace(turn, prompt_ids=(1,)) for turn in whole.turns)))
    assert [row.token_versions for row in rows] == [(3, 3), (3, 4, 4, 4, 5, 5)]


def test_a_turn_that_is_cut_at_a_stop_string_keeps_the_versions_of_what_is_left(protocol):
    ids = protocol.tokenizer.encode("</search> and more", add_special_tokens=False)
    state = RunningTrajectory(TASK, "g", 0, prompt_ids=[1], response_ids=[], open_turn=0)
    runs = ((1, 1), (2, len(ids) - 1))
    given = Generation(tuple(ids), (-0.5,) * len(ids), "length", 2, version_runs=runs)
    cut = TurnGenerator(ScriptedEngine([]), protocol)._cut_across_boundary(state, given)
    n = len(cut.token_ids)
    assert 0 < n < len(ids) and cut.stop_string == "</search>"
    assert sum(count for _, count in cut.version_runs) == (n if n > 1 else 0)
    assert cut.policy_version == (2 if n > 1 else 1)


def test_an_update_comes_between_groups():
    async def main():
        gate, log = Admission(), []

        async def group(name, seconds):
            with gate.group() as one:
                while not one.begin():
                    await one.opened()
                log.append(f"{name} begins")
                await asyncio.sleep(seconds)
                assert one.begin(), "its next member need not wait, whatever waits"
                log.append(f"{name} ends")

        async def update():
            one = object()
            gate.close(one)
            await gate.idle()
            log.append("update")
            gate.reopen(one)
            gate.reopen(one)

        first = asyncio.ensure_future(group("a", 0.02))
        await asyncio.sleep(0)
        cancelled = asyncio.ensure_future(group("b", 60))
        await asyncio.sleep(0)
        updates = [asyncio.ensure_future(update()) for _ in range(2)]
        await asyncio.sleep(0)
        later = asyncio.ensure_future(group("c", 0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(first, later, *updates)
        return log

    log = asyncio.run(asyncio.wait_for(main(), 600))
    assert log == ["a begins", "b begins", "a ends", "update", "update", "c begins", "c ends"]


class Meeting(TextEngine):
    """Its first ``wave`` requests are answered when an update waits, whenever that is."""

    def __init__(self, protocol, wave):
        super().__init__(protocol, search_then_answer, latency=0.005)
        self.wave, self.asked, self.gate = wave, 0, None
        self.goes_on = asyncio.Event()

    async def generate(self, token_ids, sampling):
        self.asked += 1
        while self.asked <= self.wave and self.gate._open.is_set():
            await asyncio.sleep(0.001)
        self.wave = 0
        await self.met()
        return await super().generate(token_ids, sampling)

    async def met(self):
        pass


class Interrupting(Meeting):
    """Presses Ctrl-C then, and answers when ``goes_on`` is set."""

    async def met(self):
        if not self.goes_on.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            await self.goes_on.wait()


def started(protocol, engine, concurrency):
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    system = RolloutSystem(engine, protocol, environment, ExactMatchReward(), concurrency=concurrency)
    system.start()
    engine.gate = system._admission
    return system


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_finish_gives_every_group_one_version(protocol, concurrency):
    """Also with fewer slots than trajectories: a group that waits holds no slot that one in flight needs."""
    wave = min(concurrency, 12)
    engine = Meeting(protocol, wave)
    system = started(protocol, engine, concurrency)
    sampling = SamplingParams(max_new_tokens=200)
    try:
        future = system.background(system.roll_out(tasks(4), n=3, sampling=sampling, seed=0, batch=0))
        version = 0
        while engine.asked < wave:
            time.sleep(0.001)
        while not future.done():
            version += 1
            system.load_weights([("a", torch.zeros(1))], version)
            time.sleep(0.02)
        done = future.result()
        again = system.rollout(tasks(4), n=3, sampling=sampling, seed=0)
    finally:
        system.close()
    assert [(t.group, t.index, t.response_ids) for t in done] == [(t.group, t.index, t.response_ids) for t in again]
    of_group = {t.group: {v for turn in t.turns for v, _ in turn.versions} for t in done}
    for t in done:
        assert {v for turn in t.turns for v, _ in turn.versions} == of_group[t.group] and len(of_group[t.group]) == 1
    versions = set.union(*of_group.values())
    assert len(versions) > 1 if concurrency < 12 else versions == {0}
    assert system.waited_s > 0


def test_ctrl_c_while_an_update_waits_closes_nothing_for_ever(protocol):
    engine = Interrupting(protocol, wave=1)
    system = started(protocol, engine, concurrency=1)
    how = {"n": 1, "sampling": SamplingParams(max_new_tokens=200), "seed": 0, "batch": 0}
    try:
        future = system.background(system.roll_out(tasks(2), **how))
        with pytest.raises(KeyboardInterrupt) as pressed:  # holds the frames that were left
            system.load_weights([("a", torch.zeros(1))], 1)
        system._thread.call(engine.goes_on.set)
        assert len(future.result(timeout=600)) == 2, "the second begins when the first has ended"
        system.load_weights([("a", torch.zeros(1))], 1)
        assert system.policy_version == 1 and pressed.type is KeyboardInterrupt
    finally:
        system.close()


def test_a_push_that_fails_is_gathered_to_the_end_and_ends(protocol, monkeypatch):
    """Without ranks: what other ranks would be told is raised here, and requests go on."""

    class Servers(VLLMServers):
        pushing = False

        async def begin_push(self):
            self.pushing = True

        async def end_push(self):
            self.pushing = False

    def full(tensors, checksum):
        next(tensors)
        del tensors  # whatever closes what it was given
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WeightFiles, "write", full)
    engine, tensors = Servers(["http://none"], "none"), iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    system = RolloutSystem(ScriptedEngine([]), protocol, environment, ExactMatchReward())
    try:
        with pytest.raises(InfrastructureError, match="could not be pushed: OSError.*No space left") as told:
            push(engine, system.background, tensors, 1)
    finally:
        system.close()
    assert told.value.__cause__.errno == errno.ENOSPC and not engine.pushing and not list(tensors)


def test_an_engine_of_ones_own_may_be_shared(protocol):
    class Shared(TextEngine):
        shared, held = True, "none"

        async def begin_push(self):
            self.held = None

        def send(self, submit, tensors, version, checksum, between_steps):
            self.held = (version, [name for name, _ in tensors])

        async def end_push(self):
            self.ended = True

    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    engine = Shared(protocol, lambda context, seed: "")
    system = RolloutSystem(engine, protocol, environment, ExactMatchReward())
    try:
        assert system.shares_engine
        system.load_weights([("a", torch.zeros(1))], 3)
        assert engine.held == (3, ["a"]) and engine.ended and system.policy_version == 3
    finally:
        system.close()


@pytest.mark.slow
def test_continue_in_the_middle_of_a_turn(model_dir, tmp_path):
    """A real engine and a real trajectory: log-probs before and after the update are those of the old and new model."""
    from transformers import AutoModelForCausalLM

    folders = [model_dir, make_model_dir(tmp_path / "new", seed=5)]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
    protocol = SearchR1Protocol(str(model_dir), template="short")
    environment = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    engine = PlainEngine(str(model_dir), max_length=512)
    system = RolloutSystem(engine, protocol, environment, ExactMatchReward(), max_turns=1, max_turn_tokens=150,
                           in_flight_updates=True)  # fmt: skip
    try:
        system.start()
        how = {"n": 2, "sampling": SamplingParams(max_new_tokens=150), "seed": 0, "batch": 0}
        future = system.background(system.roll_out([TASK, Task("q2", "Who?", (), "toy")], **how))
        version = 0
        while not future.done():
            time.sleep(0.05)
            version += 1
            system.load_weights(models[version % 2].named_parameters(), version)
        done = future.result()
    finally:
        system.close()
    assert any(turn.version_runs for t in done for turn in t.turns), "no update came in the middle of a turn"
    assert system.waited_s == 0.0
    for t in done:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        with torch.no_grad():
            logprobs = [m(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] for m in models]
        logprobs = [x[len(t.prompt_ids) - 1 :].tolist() for x in logprobs]
        for i, (version, mask) in enumerate(zip(t.token_versions, t.loss_mask, strict=True)):
            if mask:
                assert t.logprobs[i] == pytest.approx(logprobs[version % 2][i], abs=1e-3)
