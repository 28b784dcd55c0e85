"""New weights on engine servers while requests are in flight there (``rollouts.in_flight_updates: true``)."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from safetensors.torch import save_file

from rollout.engines.base import SamplingParams
from rollout.engines.server import engine as server_engine
from rollout.engines.server.engine import ServerEngine
from rollout.engines.server.nccl import NCCLSender
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts
from tests.rollout.engines.engine_servers import Running, running
from tests.rollout.engines.pushing import push_weights
from tests.rollout.engines.test_update_between_tokens import check, push_while_requests_come

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(8, temperature=0)
PROMPTS = random_prompts(4, seed=31, longest=20)
LONG = [SamplingParams(200, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture
def engine(servers, model_dir):
    return ServerEngine([server.url for server in servers], str(model_dir), max_length=256)


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
    """Pushes with requests in flight, until some of these have tokens of two versions: (version, generations)."""
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
    await push_weights(engine, reference.weights(), version)
    idle = await asyncio.gather(*ask(engine))
    assert [g.token_ids for g in after] == [g.token_ids for g in idle] and not any(g.version_runs for g in after)
    assert all(reference.largest_gap(p, g) < LOGPROB_TOLERANCE for p, g in zip(PROMPTS, after, strict=True))


def test_requests_go_on_and_say_what_sampled_them(engine, reference, other_reference):
    both = [reference, other_reference]

    async def push(version):
        asked = await push_while_requests_come(engine, both[version % 2], version, PROMPTS[0])
        assert asked.policy_version == version - 1

    async def main():
        await push_weights(engine, reference.weights(), 0)
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
        await push_weights(engine, reference.weights(), version + 1, between_steps=True)
        assert engine.pool._affinity.find([*PROMPTS[0], *done[0].token_ids, 7]) is None

    run(engine, main)


def test_what_a_push_has_sampled_that_one_refused_is_sampled_anew(
    engine, reference, other_reference, caplog, monkeypatch
):
    async def one_refuses(servers, body):
        await all_load(servers[:1], body)
        raise ValueError("the second server refuses")

    all_load = server_engine._each

    async def main():
        version = 1
        deadline = time.monotonic() + 120
        while "an incomplete push" not in caplog.text:
            assert time.monotonic() < deadline, "the first server sampled nothing from the push"
            await push_weights(engine, reference.weights(), version)
            expected = [g.token_ids for g in await asyncio.gather(*ask(engine))]
            requests = ask(engine)
            await busy(engine, requests)
            monkeypatch.setattr(server_engine, "_each", one_refuses)
            with pytest.raises(ValueError, match="the second server refuses"):
                await push_weights(engine, other_reference.weights(), version + 1, between_steps=True)
            monkeypatch.setattr(server_engine, "_each", all_load)
            done = await asyncio.gather(*requests)
            assert [g.token_ids for g in done] == expected and {g.policy_version for g in done} == {version}
            version += 2
        await push_weights(engine, other_reference.weights(), version, between_steps=True)
        assert len(engine.pool.serving) == 2
        await holds(engine, version, other_reference)

    run(engine, main)


def test_a_server_that_dies_in_a_push_is_replaced(engine, servers, reference, other_reference):
    async def main():
        def dying():
            first, *others = other_reference.weights()
            yield first
            servers[0].kill()
            yield from others

        await push_weights(engine, reference.weights(), 1)
        requests = ask(engine)
        await busy(engine, requests)
        await push_weights(engine, dying(), 2, between_steps=True)
        check(PROMPTS, await asyncio.gather(*requests), {1: reference, 2: other_reference})
        assert [server.lost is None for server in engine.pool.servers] == [False, True]
        servers[0].begin()
        await asyncio.to_thread(servers[0].wait)
        deadline = time.monotonic() + 120
        while engine.pool.servers[0].lost is not None:
            assert time.monotonic() < deadline, engine.pool.no_server_message()
            await asyncio.sleep(0.05)
        await holds(engine, 2, other_reference)

    run(engine, main)


class FileSender(NCCLSender):
    """Writes files where NCCL broadcasts."""

    def __init__(self, bucket_bytes, folder):
        super().__init__(bucket_bytes)
        self._folder = folder

    async def _join(self, servers, device):
        for server in servers:
            await server.post("/transfer/init_weight_transfer_engine", {"arguments": {}})

    def _broadcast(self, bucket):
        path = self._folder / f"{bucket[0][0]}.safetensors"
        save_file(dict(bucket), part := path.with_suffix(".part"))
        part.rename(path)


def test_a_transfer_straight_into_the_engine_stops_it_for_a_while(model_dir, reference, other_reference, tmp_path):
    """NCCL's way, whose broadcast takes files here: nothing is sampled from a model of which a part is new."""
    both = [reference, other_reference]
    with running(Running(model_dir, folder=str(tmp_path))) as (server,):
        engine = ServerEngine([server.url], str(model_dir), max_length=256)

        async def push(version):
            await push_weights(engine, both[version % 2].weights(), version, between_steps=True)

        async def main():
            engine.nccl = FileSender(3000, tmp_path)
            version, done = await until_mixed(engine, push, 0)
            assert check(PROMPTS, done, {v: both[v % 2] for v in range(version + 1)}) >= 1
            await holds(engine, version, both[version % 2])
            # One that breaks off when the model is new but for its end: all stands still until whole weights come.
            await push_weights(engine, reference.weights(), version)
            references = {version: reference}

            async def break_off_then_push(number):
                new = both[len(references) % 2]
                broken = [*new.weights(), ("unknown", torch.zeros(1))]
                with pytest.raises(ValueError, match="update_weights failed in the engine"):
                    await push_weights(engine, broken, 100 * number, between_steps=True)
                await push_weights(engine, new.weights(), number, between_steps=True)
                references[number] = new

            version, done = await until_mixed(engine, break_off_then_push, version)
            assert check(PROMPTS, done, references) >= 1

        run(engine, main)
