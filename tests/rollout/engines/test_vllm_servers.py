"""Real ``vllm serve`` processes against the engine in this process's own child and against transformers itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager

import psutil
import pytest
import torch
from aiohttp import ClientSession, web

from common.secret import SECRET_VARIABLE
from lightning_modules.models.lora import LoRA, merged_weights, scaled_adapter_weights
from rollout.engines.base import SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.vllm_servers.client import START
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY
from rollout.trajectory import InfrastructureError, PermanentFailure
from tests.conftest import make_model_dir
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, Reference, random_prompts
from tests.rollout.engines.pushing import push_weights
from tests.rollout.engines.test_update_between_tokens import check, push_while_requests_come

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(8, temperature=0)
PROMPTS = random_prompts(4, seed=31, longest=20)
LONG = [SamplingParams(200, seed=i) for i in range(len(PROMPTS))]


@pytest.fixture
def engine(urls, model_dir):
    return VLLMServers(urls, str(model_dir), max_length=256)


@asynccontextmanager
async def opened(*engines):
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 1200))


async def all_of(engine, prompts, *sampling):
    settings = sampling if len(sampling) == len(prompts) else sampling * len(prompts)
    return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)))


def tokens(generations):
    return [list(g.token_ids) for g in generations]


def ask(engine):
    return [asyncio.ensure_future(engine.generate(p, s)) for p, s in zip(PROMPTS, LONG, strict=True)]


async def metric(server, name):
    async with ClientSession(headers={"Authorization": f"Bearer {os.environ[SECRET_VARIABLE]}"}) as session:
        async with session.get(f"{server.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def until(condition, what, within_s=300):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def until_mixed(engine, push, first):
    """Pushes with requests in flight, until some of these have tokens of two versions: (version, generations)."""
    deadline, version, done = time.monotonic() + 300, first, []
    while not any(g.version_runs for g in done):
        assert time.monotonic() < deadline, "no update came in the middle"
        requests = ask(engine)
        while not all(server.in_flight for server in engine.pool.serving):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
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


def test_what_does_not_fit_is_said_before_anything_runs(urls, model_dir, untied_dir, tmp_path, monkeypatch):
    async def main():
        with pytest.raises(InfrastructureError, match="127.0.0.1:9/collective_rpc"):
            await VLLMServers(["http://127.0.0.1:9"], str(model_dir), 256).start()
        with pytest.raises(ValueError, match="takes 256 tokens, not 300"):
            await VLLMServers(urls, str(model_dir), 300).start()
        other = make_model_dir(tmp_path / "other", layers=1)
        with pytest.raises(ValueError, match=r"another model than .*: 11 weights differ, first model\.layers\.1\."):
            await VLLMServers(urls, str(other), 256).start()
        with pytest.raises(
            ValueError, match="has backend compact_agents_files; expected nccl: start it with the flags"
        ):
            await VLLMServers(urls, str(model_dir), 256, transport="nccl").start()
        for secret, found in ((None, "none was sent"), ("another", "another was sent")):
            with monkeypatch.context() as changed:
                changed.delenv(SECRET_VARIABLE)
                if secret:
                    changed.setenv(SECRET_VARIABLE, secret)
                with pytest.raises(InfrastructureError, match=f"status 401: this server requires its secret, {found}"):
                    await VLLMServers(urls, str(model_dir), 256).start()

    run(main)


def test_servers_give_what_an_engine_of_ones_own_gives(engine, model_dir, reference, other_reference):
    prompts = random_prompts(12, seed=30)
    settings = [SamplingParams(16, temperature=0.8, seed=i) for i in range(8)]
    settings += [GREEDY, SamplingParams(12, top_k=5, seed=3, top_logprobs=3), SamplingParams(12, top_p=0.7, seed=3)]
    settings += [SamplingParams(60, stop=("e", "the"), stop_token_ids=(5,), repetition_penalty=1.1, seed=4)]

    async def main():
        own = VLLMEngine(str(model_dir), max_length=256)
        async with opened(own, engine):
            for push in (None, other_reference, reference):
                if push is not None:
                    await push_weights(own, push.weights(), 3)
                    await push_weights(engine, push.weights(), 3, checksum=True)
                here, there = await all_of(own, prompts, *settings), await all_of(engine, prompts, *settings)
                for a, b in zip(here, there, strict=True):
                    assert (a.token_ids, a.finish_reason, a.logprobs) == (b.token_ids, b.finish_reason, b.logprobs)
                    assert (a.policy_version, a.stop_string) == (b.policy_version, b.stop_string)
                    assert (a.top_logprobs, a.version_runs) == (b.top_logprobs, b.version_runs)
            assert any(a.stop_string for a in here)
            # The next turn goes where the first one was, though the first server is as free as the other.
            few, first = prompts[:4], SamplingParams(150, seed=1)
            turns = [[*p, *g.token_ids, 7, 8] for p, g in zip(few, await all_of(engine, few, first), strict=True)]
            assert {engine.pool.choose(turn) for turn in turns} == set(engine.pool.servers)
            for turn in turns:
                assert (await engine.generate(turn, SamplingParams(4))).cached_tokens >= 128  # blocks of 32 tokens
            # Whoever hangs up frees the place.
            long = asyncio.ensure_future(engine.generate(prompts[0], SamplingParams(190, seed=1)))
            await until(lambda: any(server.in_flight for server in engine.pool.servers), "no request")
            long.cancel()
            for server in engine.pool.servers:
                deadline = time.monotonic() + 300
                while await metric(server, "num_requests_running"):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="exceed the engine.s max_length 256"):
                await engine.generate(prompts[0], SamplingParams(256))
            with pytest.raises(ValueError, match="expected 0 to 399"):
                await engine.generate([400], GREEDY)

    run(main)


def test_pushes_are_whole_or_nothing(engine, urls, model_dir, reference, other_reference):
    prompts = random_prompts(3, seed=31)

    async def main():
        async with opened(engine):
            await push_weights(engine, reference.weights(), 1, checksum=True)
            before = await all_of(engine, prompts, GREEDY)
            assert tokens(before) == [reference.greedy(p, 8) for p in prompts]
            nan = torch.full_like(dict(reference.weights())["model.norm.weight"], float("nan"))
            for wrong, message in ((torch.zeros(3), "model.norm.weight"), (None, "missing"), (nan, "not finite")):
                weights = dict(other_reference.weights()) | {"model.norm.weight": wrong}
                if wrong is None:
                    del weights["model.norm.weight"]
                with pytest.raises(ValueError, match=message):
                    await push_weights(engine, weights.items(), 2)
                assert tokens(await all_of(engine, prompts, GREEDY)) == tokens(before)
            await push_weights(engine, other_reference.weights(), 2)
            after = await all_of(engine, prompts, GREEDY)
            assert tokens(after) == [other_reference.greedy(p, 8) for p in prompts]
            # Finite weights, logits that are not: the request fails, and the next push leaves nothing of it.
            large = {n: t * 1e18 for n, t in reference.weights()}
            await push_weights(engine, large.items(), 3)
            with pytest.raises(PermanentFailure, match="logits are not finite"):
                await all_of(engine, prompts, GREEDY)
            await push_weights(engine, reference.weights(), 4)
            assert tokens(await all_of(engine, prompts, GREEDY)) == tokens(before)
        # Another run, which pushes nothing.
        other = VLLMServers(urls, str(model_dir), 256)
        async with opened(other):
            with pytest.raises(ValueError, match="holds the weights of another run .4-"):
                await other.generate([1, 2], GREEDY)

    run(main)
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


def test_requests_go_on_and_say_what_sampled_them(engine, reference, other_reference):
    both = [reference, other_reference]

    async def push(version):
        asked = await push_while_requests_come(engine, both[version % 2], version, PROMPTS[0])
        assert asked.policy_version == version - 1

    async def main():
        async with opened(engine):
            await push_weights(engine, reference.weights(), 0)
            version, done = await until_mixed(engine, push, 0)
            assert check(PROMPTS, done, {v: both[v % 2] for v in range(version + 1)}) >= 1
            assert not engine.pool._searches, "a server was taken for lost"
            await holds(engine, version, both[version % 2])

    run(main)


def test_a_server_that_dies_in_rollouts_and_in_a_push_loses_nothing(servers, engine, reference, other_reference):
    def engine_core(server):
        """The process with the model, which the server starts."""
        below = psutil.Process(server.process.pid).children(recursive=True)
        return next(
            child for child in below if "EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline())
        )

    async def back(server):
        server.kill()
        server.begin()
        await asyncio.to_thread(server.wait)
        await until(lambda: len(engine.pool.serving) == 2, "it did not come back")

    async def main():
        async with opened(engine):
            await push_weights(engine, other_reference.weights(), 1)
            expected = tokens(await asyncio.gather(*ask(engine)))
            # The whole server, in the middle of rollouts.
            under_way = ask(engine)
            await until(lambda: engine.pool.servers[0].in_flight, "no request")
            await asyncio.sleep(0.2)
            servers[0].kill()
            assert tokens(await asyncio.gather(*under_way)) == expected
            assert engine.pool.serving == engine.pool.servers[1:]
            await back(servers[0])  # with the weights of its folder, until it has loaded those of the push
            await holds(engine, 1, other_reference)

            # Its engine alone, in the middle of a push between steps.
            def dying():
                first, *others = reference.weights()
                yield first
                engine_core(servers[1]).send_signal(signal.SIGKILL)
                yield from others

            under_way = ask(engine)
            await push_weights(engine, dying(), 2, between_steps=True)
            done = await asyncio.gather(*under_way)
            check(PROMPTS, done, {1: other_reference, 2: reference})
            await back(servers[1])
            await holds(engine, 2, reference)

    run(main)


def test_a_server_that_missed_a_push_is_never_sampled_from(engine, reference, caplog):
    """It says that it holds the weights of its folder, as after a restart that nobody saw."""

    async def main():
        async with opened(engine):
            await push_weights(engine, reference.weights(), 1)
            held = engine.held
            first = engine.pool.servers[0]
            await first.post("/update_weight_version", {"new_version": START})
            done = await asyncio.gather(*ask(engine))
            assert {g.policy_version for g in done} == {1} and engine.held == held
            assert "it answered from weights 0-start" in caplog.text
            await until(lambda: len(engine.pool.serving) == 2, "it did not load the weights")
            await holds(engine, 1, reference)

    run(main)


def test_adapters_sample_as_merged_weights(urls, model_dir, other_dir, reference):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    LoRA(rank=4, alpha=6.0).attach(model)
    adapters = {}
    generator = torch.Generator().manual_seed(1)

    def change():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        adapters[len(adapters) + 1] = dict(scaled_adapter_weights(model)), dict(merged_weights(model))

    async def main():
        engine = VLLMServers(urls, str(model_dir), 256, adapters=True)
        plain = VLLMServers(urls, str(model_dir), 256)
        async with opened(plain):  # the tests above have pushed other weights
            await push_weights(plain, reference.weights(), 9)
            for server in plain.pool.servers:
                await server.post("/update_weight_version", {"new_version": START})
        async with opened(engine):
            for version in (1, 2, 3):
                change()
                under_way = ask(engine)
                await push_weights(engine, adapters[version][0].items(), version, between_steps=True)
                merged = Reference(model_dir)
                merged.model.load_state_dict(adapters[version][1], strict=False)
                after = await asyncio.gather(*ask(engine))
                assert {g.policy_version for g in after} == {version}
                assert all(merged.largest_gap(p, g) < LOGPROB_TOLERANCE for p, g in zip(PROMPTS, after, strict=True))
                assert reference.largest_gap(PROMPTS[0], after[0]) > 0.1
                assert {g.policy_version for g in await asyncio.gather(*under_way)} == {version - 1}
            # A push waits for requests that name an adapter whose files it would remove.
            older = ask(engine)
            for version in (4, 5):
                change()
                await push_weights(engine, adapters[version][0].items(), version, between_steps=True)
            assert {g.policy_version for g in await asyncio.gather(*older)} == {3}
            assert {g.policy_version for g in await asyncio.gather(*ask(engine))} == {5}
            size = sum(path.stat().st_size for path in (SHARED_MEMORY / engine.held.adapter).iterdir())
            assert size < 0.7 * sum(t.nbytes for _, t in reference.weights())
        large = {name: tensor.repeat(3, 1) if "lora_A" in name else tensor.repeat(1, 3) for name, tensor in
                 adapters[1][0].items()}  # fmt: skip
        with pytest.raises(ValueError, match="takes adapters of rank 8, the policy's have 12; start it with a larger"):
            async with opened(engine):
                await push_weights(engine, large.items(), 6)
        with pytest.raises(ValueError, match="serves other weights .* than the policy's base"):
            await VLLMServers(urls, str(other_dir), 256, adapters=True).start()
        wrong = dict(scaled_adapter_weights(model)) | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(3, 32)}
        with pytest.raises(ValueError, match=r"adapters of one rank .model.lora.; found ranks .3, 4"):
            async with opened(engine):
                await push_weights(engine, wrong.items(), 6)

    run(main)
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


def test_a_router_in_front_takes_the_requests_for_tokens(urls, model_dir, reference, other_reference):
    reached = []

    async def main():
        async def forward(request):
            url = urls[len(reached) % 2]
            reached.append(url)
            async with session.post(url + request.path, data=await request.read(), headers=request.headers) as answer:
                return web.json_response(json.loads(await answer.read()), status=answer.status)

        app = web.Application()
        app.router.add_post("/inference/v1/generate", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession() as session:
            engine = VLLMServers(urls, str(model_dir), 256, router=address)
            async with opened(engine):
                for version, model in ((1, reference), (2, other_reference)):
                    await push_weights(engine, model.weights(), version)
                    done = await all_of(engine, PROMPTS, GREEDY)
                    assert tokens(done) == [model.greedy(p, 8) for p in PROMPTS]
                # Behind the router a server holds other weights: its answers are dropped until it has loaded these.
                await engine.pool.servers[1].post("/update_weight_version", {"new_version": START})
                done = await all_of(engine, PROMPTS, GREEDY)
                assert {g.policy_version for g in done} == {2}
        await runner.cleanup()

    run(main)
    assert set(reached) == set(urls)
