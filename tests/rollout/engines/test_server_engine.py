"""Engine servers, real ones, against the engine in this process's own child and against transformers itself."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from contextlib import asynccontextmanager

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.server.engine import ServerEngine
from rollout.engines.server.pool import PrefixAffinity
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY
from rollout.trajectory import InfrastructureError
from tests.conftest import make_model_dir
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts
from tests.rollout.engines.engine_servers import Running, running
from tests.rollout.engines.plain_backend import PlainEngine
from tests.rollout.engines.pushing import push_weights

GREEDY = SamplingParams(12, temperature=0)


@pytest.fixture
def urls(servers):
    return [server.url for server in servers]


@asynccontextmanager
async def opened(*engines):
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 3600))


async def all_of(engine, prompts, *sampling):
    settings = sampling if len(sampling) == len(prompts) else sampling * len(prompts)
    return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)))


def tokens(generations):
    return [list(g.token_ids) for g in generations]


@pytest.mark.slow
def test_servers_give_what_an_engine_of_ones_own_gives(urls, model_dir, reference, other_reference):
    prompts = random_prompts(10, seed=30)
    settings = [SamplingParams(16, temperature=0.8, seed=i) for i in range(9)] + [GREEDY]

    async def main():
        own = PlainEngine(str(model_dir))
        async with opened(own, ServerEngine(urls, str(model_dir), max_length=256)) as (own, engine):
            for push in (None, other_reference, reference):
                if push is not None:
                    await push_weights(own, push.weights(), 3)
                    await push_weights(engine, push.weights(), 3, checksum=True)
                here, there = await all_of(own, prompts, *settings), await all_of(engine, prompts, *settings)
                for a, b in zip(here, there, strict=True):
                    assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
                    assert (a.policy_version, a.stop_string) == (b.policy_version, b.stop_string)
                    assert a.logprobs == pytest.approx(b.logprobs, abs=LOGPROB_TOLERANCE)
            # The next turn goes where the first one was, though the first server is as free as the other.
            few = prompts[:4]
            turns = [[*p, *g.token_ids, 7, 8] for p, g in zip(few, await all_of(engine, few, GREEDY), strict=True)]
            assert {engine.pool.choose(turn) for turn in turns} == set(engine.pool.servers)
            for turn, prompt in zip(turns, few, strict=True):
                assert (await engine.generate(turn, GREEDY)).cached_tokens > len(prompt) + 8
            # Whoever hangs up frees the place.
            long = asyncio.ensure_future(engine.generate(prompts[0], SamplingParams(190, seed=1)))
            await asyncio.sleep(0.2)
            long.cancel()
            deadline = time.monotonic() + 300
            while any([(await server.health())["running"] for server in engine.pool.servers]):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="exceed the engine.s max_length 256"):
                await engine.generate(prompts[0], SamplingParams(256))
            with pytest.raises(ValueError, match="expected 0 to 399"):
                await engine.generate([400], GREEDY)

    run(main)


@pytest.mark.slow
def test_pushes_are_whole_or_nothing(urls, model_dir, reference, other_reference):
    prompts = random_prompts(3, seed=31)

    async def main():
        async with opened(ServerEngine(urls, str(model_dir), max_length=256)) as (engine,):
            await push_weights(engine, reference.weights(), 1, checksum=True)
            before = await all_of(engine, prompts, GREEDY)
            assert tokens(before) == [reference.greedy(p, 12) for p in prompts]
            for wrong, message in (({"model.norm.weight": torch.zeros(3)}, "model.norm.weight"), ({}, "missing")):
                weights = dict(other_reference.weights()) | wrong
                if not wrong:
                    del weights["model.norm.weight"]
                with pytest.raises(ValueError, match=message):
                    await push_weights(engine, weights.items(), 2)
                assert tokens(await all_of(engine, prompts, GREEDY)) == tokens(before)
            await push_weights(engine, other_reference.weights(), 2)
            after = await all_of(engine, prompts, GREEDY)
            assert tokens(after) == [other_reference.greedy(p, 12) for p in prompts]
            assert {g.policy_version for g in after} == {2}
            assert {g.policy_version for g in (await engine.probe(prompts[0], GREEDY)).values()} == {2}

    run(main)
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


@pytest.mark.slow
def test_what_does_not_fit_is_said_before_anything_runs(urls, model_dir, untied_dir, tmp_path):
    async def main():
        with pytest.raises(InfrastructureError, match="127.0.0.1:9/health"):
            await ServerEngine(["http://127.0.0.1:9"], str(model_dir), 256).start()
        with pytest.raises(ValueError, match="takes 256 tokens, not 300"):
            await ServerEngine(urls, str(model_dir), 300).start()
        other = make_model_dir(tmp_path / "other", layers=1)
        with pytest.raises(ValueError, match=r"another model than .*: 11 weights differ, first model\.layers\.1\."):
            await ServerEngine(urls, str(other), 256).start()
        # The servers hold what the tests above have pushed, and this "run" pushes nothing.
        async with opened(ServerEngine(urls, str(model_dir), 256)) as (engine,):
            with pytest.raises(ValueError, match="holds the weights of another run .version"):
                await engine.generate([1, 2], GREEDY)

    run(main)
    for wrong in ([], ["localhost:1"], ["http://a", "http://a"]):
        with pytest.raises(ValueError, match="urls"):
            ServerEngine(wrong, "m")


@pytest.mark.slow
def test_a_server_that_does_not_see_the_files_is_refused(urls, model_dir, tmp_path, monkeypatch):
    """One on another machine, or in a container of its own."""
    written = tmp_path / "elsewhere"
    written.mkdir()
    monkeypatch.setattr("rollout.engines.server.engine.new_file", lambda folder: written / "unknown")
    with pytest.raises(
        ValueError, match="cannot read this host's /dev/shm .* take transport: nccl, or start it on this"
    ):
        asyncio.run(ServerEngine(urls, str(model_dir), 256).start())


@pytest.mark.slow
def test_a_server_that_dies_is_replaced_by_the_other_and_comes_back(servers, urls, model_dir, other_reference):
    prompts = random_prompts(8, seed=32)
    sampling = [SamplingParams(180, seed=i) for i in range(8)]

    async def main():
        engine = ServerEngine(urls, str(model_dir), max_length=256, retry_s=0.5)
        async with opened(engine):
            await push_weights(engine, other_reference.weights(), 7)
            expected = await all_of(engine, prompts, *sampling)
            working = False
            while not working:  # until one looks at it in time
                under_way = asyncio.ensure_future(all_of(engine, prompts, *sampling))
                while not working and not under_way.done():
                    working = (await engine.pool.servers[0].health())["running"] > 0
            servers[0].kill()
            assert tokens(await under_way) == tokens(expected)
            assert [server.lost is None for server in engine.pool.servers] == [False, True]
            servers[0].begin()  # version 0 again: the weights of its folder
            await asyncio.to_thread(servers[0].wait)
            deadline = time.monotonic() + 300
            while engine.pool.servers[0].lost is not None:
                assert time.monotonic() < deadline, engine.pool.no_server_message()
                await asyncio.sleep(0.1)
            both = await engine.probe(prompts[0], GREEDY)
            assert [list(g.token_ids) for g in both.values()] == [other_reference.greedy(prompts[0], 12)] * 2
            assert {g.policy_version for g in both.values()} == {7}
            for server in servers:  # nothing below needs them any more
                server.kill()
            with pytest.raises(InfrastructureError, match="no engine server serves: http://127"):
                await engine.generate(prompts[0], GREEDY)

    run(main)


def test_affinity_binds_what_was_sampled_and_nothing_else():
    affinity = PrefixAffinity(most=3)
    affinity.remember([1, 2, 3, 4], "a")
    assert affinity.find([1, 2, 3, 4, 9]) == "a"
    assert affinity.find([1, 2, 3, 4]) == "a"
    assert affinity.find([1, 2, 3]) is None  # a prompt that others have in common
    affinity.remember([1, 2, 3, 4, 9, 9], "b")
    assert affinity.find([1, 2, 3, 4, 9, 9, 5]) == "b"
    for i in range(2):
        affinity.remember([i], "c")
    assert affinity.find([1, 2, 3, 4]) == "c"  # by its first token: the longer one is forgotten


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
def test_a_vllm_server_gives_what_a_vllm_engine_of_ones_own_gives(model_dir, other_reference):
    options = {"max_length": 256, "kv_cache_bytes": 32 << 20}
    path = "rollout.engines.vllm_engine.VLLMEngine"
    prompts = random_prompts(5, seed=33)
    settings = [SamplingParams(12, temperature=0.8, seed=i, top_logprobs=2) for i in range(4)] + [GREEDY]

    async def main():
        own = VLLMEngine(str(model_dir), **options)
        async with opened(own, ServerEngine([server.url], str(model_dir), 256)) as (own, engine):
            for one in (own, engine):
                await push_weights(one, other_reference.weights(), 1, checksum=True)
            here, there = await all_of(own, prompts, *settings), await all_of(engine, prompts, *settings)
            assert tokens(there) == tokens(here)
            assert tokens(there)[-1] == other_reference.greedy(prompts[-1], 12)
            assert {g.policy_version for g in there} == {1}
            for a, b in zip(here, there, strict=True):
                assert [set(t) for t in a.top_logprobs or ()] == [set(t) for t in b.top_logprobs or ()]

    served = Running(model_dir, path, **options)
    with running(served) as (server,):
        run(main)
