"""New weights on engine servers while requests are under way there (``rollouts.in_flight: continue``)."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.server_engine import ServerEngine
from rollout.engines.weight_transport import SharedMemory
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts
from tests.rollout.engines.engine_servers import Running, running
from tests.rollout.engines.file_transfer_engine import FileTransport
from tests.rollout.engines.test_update_between_tokens import check, push_while_requests_come

GREEDY = SamplingParams(8, temperature=0)
PROMPTS = random_prompts(4, seed=31, longest=20)
LONG = [SamplingParams(200, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture
def engine(servers, model_dir, request):
    transport = getattr(request, "param", "shared_memory")
    return ServerEngine([server.url for server in servers], str(model_dir), max_length=256, transport=transport)


def run(engine, main):
    async def whole():
        await engine.start()
        try:
            await main()
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(whole(), 300))


def ask(engine):
    return [asyncio.ensure_future(engine.generate(p, s)) for p, s in zip(PROMPTS, LONG, strict=True)]


async def busy(engine, requests):
    """Until every server is sampling, or the requests are over before they were looked at."""
    for server in engine.pool.serving:
        while not (await server.health())["running"] and not all(request.done() for request in requests):
            await asyncio.sleep(0.001)


async def until_mixed(engine, push, first):
    """Pushes with requests under way, until some of these have tokens of two versions: (version, generations)."""
    deadline, version, done = time.monotonic() + 120, first, []
    while not any(g.version_runs for g in done):
        assert time.monotonic() < deadline, "no update came in the middle"
        requests = ask(engine)
        await busy(engine, requests)
        version += 1
        await push(version)
        done = await asyncio.gather(*requests)
    return version, done


async def holds(engine, version, reference):
    """Every server samples from these weights, greedily and with seeds, as after a push into idle servers."""
    said = await engine.probe(PROMPTS[0], GREEDY)
    assert {list(g.token_ids) == reference.greedy(PROMPTS[0], 8) for g in said.values()} == {True}
    assert {g.policy_version for g in said.values()} == {version}
    after = await asyncio.gather(*ask(engine))
    await engine.load_weights(reference.weights(), version)
    idle = await asyncio.gather(*ask(engine))
    assert [g.token_ids for g in after] == [g.token_ids for g in idle] and not any(g.version_runs for g in after)
    assert all(reference.largest_gap(p, g) < LOGPROB_TOLERANCE for p, g in zip(PROMPTS, after, strict=True))


@pytest.mark.parametrize("engine", ["shared_memory", "http"], indirect=True)
def test_requests_go_on_and_say_what_sampled_them(engine, reference, other_reference):
    both = [reference, other_reference]

    async def push(version):
        asked = await push_while_requests_come(engine, both[version % 2], version, PROMPTS[0])
        assert asked.policy_version == version - 1

    async def main():
        if hasattr(engine._transport, "_bucket_bytes"):
            engine._transport._bucket_bytes = 3000  # many buckets of a model this small
        await engine.load_weights(reference.weights(), 0)
        version, done = await until_mixed(engine, push, 0)
        assert check(PROMPTS, done, {v: both[v % 2] for v in range(version + 1)}) >= 1
        assert not engine.pool._searches, "a server was taken for lost"
        # The next turn of what the new weights have ended is bound to its server; of what the old ones have, to none.
        for prompt, generation in zip(PROMPTS, done, strict=True):
            turn = [*prompt, *generation.token_ids, 7]
            bound = engine.pool._affinity.find(turn)
            assert (bound is not None) == (generation.policy_version == version)
            if bound is not None:
                assert (await engine.generate(turn, GREEDY)).cached_tokens > len(prompt)
        await holds(engine, version, both[version % 2])
        await engine.load_weights(reference.weights(), version + 1, between_steps=True)
        assert engine.pool._affinity.find([*PROMPTS[0], *done[0].token_ids, 7]) is None

    run(engine, main)


class OneRefuses(SharedMemory):
    """The first server takes the weights, then another is said to have refused them."""

    async def push(self, servers, *arguments):
        await super().push(servers[:1], *arguments)
        raise ValueError("the second server refuses")


def test_what_a_push_has_sampled_that_one_refused_is_sampled_anew(engine, reference, other_reference, caplog):
    async def main():
        whole, version = engine._transport, 1
        deadline = time.monotonic() + 120
        while "a push that not all have taken" not in caplog.text:
            assert time.monotonic() < deadline, "the first server sampled nothing from the push"
            await engine.load_weights(reference.weights(), version)
            expected = [g.token_ids for g in await asyncio.gather(*ask(engine))]
            requests = ask(engine)
            await busy(engine, requests)
            engine._transport = OneRefuses(keep=False)
            with pytest.raises(ValueError, match="the second server refuses"):
                await engine.load_weights(other_reference.weights(), version + 1, between_steps=True)
            engine._transport = whole
            done = await asyncio.gather(*requests)
            assert [g.token_ids for g in done] == expected and {g.policy_version for g in done} == {version}
            version += 2
        await engine.load_weights(other_reference.weights(), version, between_steps=True)
        assert len(engine.pool.serving) == 2
        await holds(engine, version, other_reference)

    run(engine, main)


@pytest.mark.parametrize("engine", ["http"], indirect=True)
def test_a_server_that_dies_in_a_push_is_replaced(engine, servers, reference, other_reference):
    async def main():
        def dying():
            first, *others = other_reference.weights()
            yield first
            servers[0].kill()
            yield from others

        engine._transport._bucket_bytes = 3000  # many buckets of a model this small
        await engine.load_weights(reference.weights(), 1)
        requests = ask(engine)
        await busy(engine, requests)
        await engine.load_weights(dying(), 2, between_steps=True)
        check(PROMPTS, await asyncio.gather(*requests), {1: reference, 2: other_reference})
        assert [server.lost is None for server in engine.pool.servers] == [False, True]
        servers[0].begin()
        await asyncio.to_thread(servers[0].wait)
        deadline = time.monotonic() + 120
        while engine.pool.servers[0].lost is not None:
            assert time.monotonic() < deadline, engine.pool.nobody()
            await asyncio.sleep(0.05)
        await holds(engine, 2, other_reference)

    run(engine, main)


def test_a_transfer_straight_into_the_engine_stops_it_for_a_while(model_dir, reference, other_reference, tmp_path):
    """NCCL's way, whose broadcast takes files here: nothing is sampled from a model of which a part is new."""
    both = [reference, other_reference]
    init = {"model": str(model_dir), "slots": 4, "max_length": 256, "folder": str(tmp_path)}
    path = "tests.rollout.engines.file_transfer_engine.FileTransferEngine"

    with running(Running(model_dir, tmp_path, class_path=path, init_args=init)) as (server,):
        engine = ServerEngine([server.url], str(model_dir), max_length=256)

        async def push(version):
            await engine.load_weights(both[version % 2].weights(), version, between_steps=True)

        async def main():
            engine._transport.close()
            engine._transport = FileTransport(3000, tmp_path)
            version, done = await until_mixed(engine, push, 0)
            assert check(PROMPTS, done, {v: both[v % 2] for v in range(version + 1)}) >= 1
            await holds(engine, version, both[version % 2])
            # One that breaks off when the model is new but for its end: all stands still until whole weights come.
            await engine.load_weights(reference.weights(), version)
            references = {version: reference}

            async def break_off_then_push(number):
                new = both[len(references) % 2]
                broken = [*new.weights(), ("unknown", torch.zeros(1))]
                with pytest.raises(ValueError, match="update_weights failed in the engine"):
                    await engine.load_weights(broken, 100 * number, between_steps=True)
                await engine.load_weights(new.weights(), number, between_steps=True)
                references[number] = new

            version, done = await until_mixed(engine, break_off_then_push, version)
            assert check(PROMPTS, done, references) >= 1

        run(engine, main)
