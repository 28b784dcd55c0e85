"""Engines whose process dies or hangs: started anew, with the weights it held, and what it was sampling sampled again.
Real processes that end by real signals."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import signal
from contextlib import asynccontextmanager

import pytest
import torch

from rollout.engines.base import EngineGone, SamplingParams, WeightsLost
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.weights import files as weight_files
from rollout.engines.weights import ipc
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY, WeightFiles
from rollout.trajectory import InfrastructureError, PermanentFailure
from tests.processes import alive
from tests.rollout.engines.conftest import random_prompts
from tests.rollout.engines.dying_backend import DyingEngine, table
from tests.rollout.engines.pushing import push_weights
from tests.rollout.engines.test_engine_process import ONE, echo

PROMPTS = [[word] for word in range(4)]
LONG = [SamplingParams(12, temperature=0.9, seed=i) for i in range(len(PROMPTS))]


def run(main):
    return asyncio.run(asyncio.wait_for(main, 3600))


@asynccontextmanager
async def started(engine):
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        assert not list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*")), "copies of weights are left behind"


async def ask(engine):
    return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(PROMPTS, LONG, strict=True)))


def expected(seed, version):
    """What a process that nothing happens to makes of ``PROMPTS``: its own arithmetic, once more here."""
    made, weights = [], sum(table(seed).values())
    for prompt, sampling in zip(PROMPTS, LONG, strict=True):
        generator, ids = torch.Generator().manual_seed(sampling.seed), list(prompt)
        for _ in range(sampling.max_new_tokens):
            ids.append(int(torch.multinomial(weights[ids[-1]].softmax(-1), 1, generator=generator)))
        made.append((tuple(ids[1:]), version, ()))
    return made


def sampled(generations):
    return [(g.token_ids, g.policy_version, g.version_runs) for g in generations]


async def push(engine, seed, version, **options):
    await push_weights(engine, table(seed).items(), version, **options)


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["killed", "stopped"])
def test_what_a_dead_or_hung_child_was_sampling_is_sampled_again(tmp_path, stops, caplog):
    log = tmp_path / "log"

    async def main():
        async with started(
            DyingEngine(log=str(log), at="step", stops=stops, heartbeat_timeout_s=20.0 if stops else 600)
        ) as engine:
            await push(engine, 1, 3)
            first = engine.pid
            assert sampled(await ask(engine)) == expected(1, 3)
            assert engine.pid != first and not alive(first)
            assert log.read_text().split()[:5] == ["start", "load", "step", "start", "load"]

    run(main())
    why = "no heartbeat for 20 s .option heartbeat_timeout_s." if stops else "killed by SIGKILL"
    (died,) = [record.message for record in caplog.records if "the engine died" in record.message]
    assert re.search(f"{why}.* restarted .1 of 3 within an hour. with the weights of version 3", died)


@pytest.mark.slow
def test_a_child_that_hangs_while_it_starts(tmp_path, caplog):
    """Another is started. That takes longer than ``heartbeat_timeout_s``, and is waited for: it gives signs of life."""
    log = tmp_path / "log"

    async def main():
        engine = DyingEngine(log=str(log), at="start", stops=True, takes_s=11.0, heartbeat_timeout_s=10.0, restarts=1)
        async with started(engine):
            assert sampled(await ask(engine)) == expected(0, 0)

    run(main())
    assert log.read_text().split()[:2] == ["start", "start"]
    (said,) = [record.getMessage() for record in caplog.records if "hung while it started" in record.getMessage()]
    assert said.endswith("Another is started (1 of 1 within an hour)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "at"),
    [("files", "load"), ("ipc", "b")],
)
def test_a_push_in_which_the_child_dies_is_repeated_whole(tmp_path, transport, at, monkeypatch):
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 1)  # a bucket for each tensor

    async def main():
        async with started(DyingEngine(transport, log=str(tmp_path / "log"), at=at)) as engine:
            await push(engine, 1, 3, checksum=True)
            assert sampled(await ask(engine)) == expected(1, 3)
            calls = (tmp_path / "log").read_text().split()
            assert calls.count("start") == 2 and calls.count("load") == (2 if transport == "files" else 1)
            # The next one goes its usual way, and what it brings is what a third process gets.
            await push(engine, 2, 4)
            os.kill(engine.pid, signal.SIGKILL)
            assert sampled(await ask(engine)) == expected(2, 4)

    run(main())


def test_an_update_between_tokens_and_its_child_dies(tmp_path, monkeypatch):
    """What was in flight is sampled from the new weights alone: none of its tokens is left from before."""
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 1)

    async def main():
        async with started(DyingEngine("ipc", log=str(tmp_path / "log"), at="b")) as engine:
            asked = [asyncio.ensure_future(engine.generate([1], SamplingParams(250, seed=i))) for i in range(2)]
            await asyncio.sleep(0)
            await push(engine, 1, 3, between_steps=True)
            for generation in await asyncio.gather(*asked):
                versions = [version for version, _ in generation.version_runs] or [generation.policy_version]
                assert versions in ([3], [0, 3], [0])
            assert sampled(await ask(engine)) == expected(1, 3)

    run(main())


@pytest.mark.slow
def test_requests_before_an_update_are_sampled_again_from_the_old_weights(tmp_path):
    """The update waits for them; the process dies in their middle, and what was asked after the update waits, too."""

    async def main():
        async with started(DyingEngine(log=str(tmp_path / "log"), at="step")) as engine:
            before = asyncio.ensure_future(ask(engine))
            await asyncio.sleep(0.01)
            written = WeightFiles.write(table(1).items())
            update = asyncio.ensure_future(engine.load_files(written, 3))
            await asyncio.sleep(0.01)
            after = asyncio.ensure_future(ask(engine))
            assert sampled(await before) == expected(0, 0) and sampled(await after) == expected(1, 3)
            await update
            written.remove()
            # Nobody has kept them: a third process would sample from others, so it does not.
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(WeightsLost, match="its weights .version 3. are not kept"):
                await ask(engine)
            with pytest.raises(ValueError, match="do not fit"):
                await push_weights(engine, [("other", torch.ones(2))], 4)
            with pytest.raises(WeightsLost):
                await ask(engine)
            await push(engine, 1, 3)
            assert sampled(await ask(engine)) == expected(1, 3)

    run(main())


@pytest.mark.slow
def test_a_copy_that_has_changed_is_refused_by_its_checksum(tmp_path):
    async def main():
        async with started(DyingEngine(log=str(tmp_path / "log"))) as engine:
            await push(engine, 1, 3)
            with open(engine.kept.paths[0], "r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(WeightsLost, match="refused the kept weights: the weights changed in"):
                await ask(engine)
            await push(engine, 1, 3)
            assert sampled(await ask(engine)) == expected(1, 3)

    run(main())


@pytest.mark.slow
def test_without_room_for_a_copy_the_push_goes_on(tmp_path, monkeypatch, caplog):
    def full(files, shard):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files.WeightFiles, "_write_shard", full)

    async def main():
        async with started(DyingEngine("ipc", log=str(tmp_path / "log"))) as engine:
            await push(engine, 1, 3)
            assert sampled(await ask(engine)) == expected(1, 3) and engine.kept is None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(WeightsLost, match="not kept"):
                await ask(engine)

    run(main())
    assert any("no copy of the weights is kept" in record.message for record in caplog.records)


def test_a_child_that_dies_again_and_again_is_given_up_with_the_reason():
    async def main():
        async with started(echo(restarts=1)) as engine:
            poison = asyncio.ensure_future(engine.generate([14], ONE))
            await asyncio.sleep(0)
            others = [asyncio.ensure_future(engine.generate([i], ONE)) for i in (1, 2)]
            for outcome in await asyncio.gather(poison, *others, return_exceptions=True):
                message = r"the engine died: .* exit code 3; .*; it was restarted once within an hour .option rest"
                assert isinstance(outcome, InfrastructureError) and re.match(message, str(outcome))
                assert "\n" not in str(outcome)
            with pytest.raises(InfrastructureError, match="exit code 3"):
                await engine.generate([1], ONE)

    run(main())


@pytest.mark.parametrize("fails_to_load", [False, True])
def test_an_exception_before_the_first_answer_ends_the_engine_without_a_restart(fails_to_load, caplog):
    async def main():
        async with started(echo(restarts=3, fails_to_load=fails_to_load)) as engine:
            first = engine.pid
            message = "^the engine died before it answered a request: an exception in its process: "
            message += "ValueError: it failed half-way$" if fails_to_load else "ZeroDivisionError: thirteen$"
            with pytest.raises(EngineGone, match=message):
                if fails_to_load:
                    await push_weights(engine, [("weight", torch.ones(2, 2))], 1)
                else:
                    await engine.generate([13], ONE)
            assert engine.pid == first and engine.gone

    run(main())
    assert not any("restarted" in record.message for record in caplog.records)


@pytest.mark.slow
def test_an_exception_after_an_answer_is_followed_by_a_restart():
    async def main():
        async with started(echo(restarts=1)) as engine:
            first = engine.pid
            await engine.generate([1], ONE)
            poison = asyncio.ensure_future(engine.generate([13], ONE))
            while engine.pid == first:
                await asyncio.sleep(0.001)
            poison.cancel()
            assert (await engine.generate([2], ONE)).token_ids == (2,)

    run(main())


@pytest.mark.slow
def test_a_request_that_ends_two_children_is_not_sent_to_a_third():
    """In company it is known after a third death, and the company is answered."""

    async def main():
        async with started(echo(restarts=3)) as engine:
            requests = [asyncio.ensure_future(engine.generate([i], ONE)) for i in (14, 2, 3)]
            while engine._children.spawned < 3:
                await asyncio.sleep(0.01)
            requests.append(asyncio.ensure_future(engine.generate([4], ONE)))  # waits for the trial's end
            refused, *answered = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(refused, PermanentFailure) and "died 3 times" in str(refused)
            assert [generation.token_ids for generation in answered] == [(2,), (3,), (4,)]
            assert engine._children.spawned == 4 and not engine._on_trial

    run(main())


@pytest.mark.slow
def test_an_update_that_ends_two_children_is_not_sent_to_a_third():
    async def main():
        async with started(echo(restarts=3, fails_to_load=True)) as engine:
            await engine.generate([1], ONE)
            with pytest.raises(InfrastructureError, match=r"not be pushed: .* died 2 times .* .load. in flight"):
                await push_weights(engine, [("weight", torch.ones(2, 2))], 1)
            assert (await engine.generate([1], ONE)).token_ids == (1,)

    run(main())


@pytest.mark.slow
def test_a_trial_ends_when_its_request_is_cancelled():
    async def main():
        async with started(echo(restarts=3)) as engine:
            silent = [asyncio.ensure_future(engine.generate([12], ONE)) for _ in range(2)]
            for children in (2, 3):
                await asyncio.sleep(0)
                os.kill(engine.pid, signal.SIGKILL)
                while engine._children.spawned < children or not engine._up:
                    await asyncio.sleep(0.01)
            later = asyncio.ensure_future(engine.generate([1], ONE))
            for request in silent:
                await asyncio.sleep(0)
                assert engine._on_trial and not later.done()
                request.cancel()
            assert (await later).token_ids == (1,)

    run(main())


@pytest.mark.slow
def test_a_close_in_a_revival_leaves_no_process(caplog):
    async def main():
        engine = echo(restarts=3)
        await engine.start()
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        request = asyncio.ensure_future(engine.generate([1], ONE))
        while engine.pid == first:
            await asyncio.sleep(0.001)
        second = engine.pid
        await engine.close()
        assert not alive(second)
        with pytest.raises(InfrastructureError, match="the engine was closed"):
            await request
        await engine.start()
        assert (await engine.generate([3], ONE)).token_ids == (3,)
        third = engine.pid
        await engine.close()
        assert not alive(third) and len({first, second, third}) == 3

    with caplog.at_level(logging.WARNING):
        run(main())
    assert not any("runs again" in record.message for record in caplog.records)


@pytest.mark.slow
def test_one_that_dies_asleep_is_started_when_it_is_woken(tmp_path):
    """Before, the trainer has its memory."""
    engine = DyingEngine(log=str(tmp_path / "log"))
    engine.allow_sleep()

    async def main():
        async with started(engine):
            await push(engine, 1, 3)
            await engine.sleep()
            first = engine.pid
            os.kill(first, signal.SIGKILL)
            while engine._died_asleep is None:
                await asyncio.sleep(0.01)
            await engine.sleep()  # as it is
            assert engine.pid == first
            await engine.wake_up()
            assert sampled(await ask(engine)) == expected(1, 3) and engine.pid != first
            calls = [line for line in (tmp_path / "log").read_text().split("\n") if line != "step"]
            again = ["start", "load", "sleep", "wake weights", "wake kv_cache", ""]
            assert calls == ["start", "load", "sleep", *again]
            await engine.sleep()
            os.kill(engine.pid, signal.SIGKILL)
            await push(engine, 2, 4)
            assert sampled(await ask(engine)) == expected(2, 4)

    run(main())


def test_a_request_that_the_backend_does_not_take_fails_alone():
    async def main():
        async with started(echo()) as engine:
            with pytest.raises(ValueError, match="the engine refuses this request: sixteen"):
                await engine.generate([16], ONE)
            assert (await engine.generate([1], ONE)).token_ids == (1,)

    run(main())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
def test_vllm_itself_killed(model_dir, other_reference):
    prompts = random_prompts(4, seed=40, longest=60)

    async def answers(engine, signal_number=None):
        asked = asyncio.gather(*(engine.generate(p, SamplingParams(150, seed=7)) for p in prompts))
        await asyncio.sleep(0.02)  # so that some of it is sampled
        if signal_number is not None:
            os.kill(engine.pid, signal_number)
        return [(g.token_ids, g.logprobs, g.policy_version) for g in await asked]

    async def main():
        async with started(VLLMEngine(str(model_dir), max_length=256, kv_cache_bytes=32 << 20)) as engine:
            await push_weights(engine, other_reference.weights(), 3)
            undisturbed = await answers(engine)
            assert await answers(engine, signal.SIGKILL) == undisturbed

    run(main())
