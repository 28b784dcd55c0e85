"""What becomes of requests and pushes when servers refuse, forget, restart, hang or lie: against stand-ins."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.vllm_servers import client as clients
from rollout.engines.vllm_servers import engine as module
from rollout.engines.vllm_servers import pool as pools
from rollout.engines.vllm_servers.client import version_of
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.vllm_servers.flags import NCCL
from rollout.engines.vllm_servers.nccl import NCCLSender
from rollout.engines.vllm_servers.pool import PrefixAffinity
from rollout.trajectory import InfrastructureError, PermanentFailure
from tests.rollout.engines.pushing import push_weights
from tests.rollout.engines.stand_in import WORDS, StandIn, continuation, table

SAMPLING = SamplingParams(6, temperature=0)


@asynccontextmanager
async def fleet(count=2, **options):
    """Stand-ins, and an engine over them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(StandIn().running()) for _ in range(count)]
        engine = VLLMServers([s.url for s in servers], "m", 64, **{"retry_s": 20.0, **options})
        engine._shapes = {"scores": (WORDS, WORDS)}, set()
        await engine.start()
        try:
            yield engine, *servers
        finally:
            await engine.close()


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 300))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "check_model_folder", lambda model: None)
    monkeypatch.setattr(pools, "digest_of_folder", lambda model: "the folder's")
    monkeypatch.setattr(pools, "LONGEST_PAUSE_S", 0.05)


class Sender(NCCLSender):
    """Notes what it would broadcast. ``stuck``: a server does not join the broadcast, which then never ends."""

    stuck = False

    async def _join(self, servers, device):
        self.sent, self._members = [], ("joined",)

    def _broadcast(self, bucket):
        if self.stuck:
            threading.Event().wait()
        self.sent.append({name: tensor.clone() for name, tensor in bucket})


async def whole(engine):
    """Until every server serves."""
    while len(engine.pool.serving) < len(engine.pool.servers):
        await asyncio.sleep(0.01)


def test_what_one_server_refuses_no_server_loads():
    async def main():
        async with fleet() as (engine, first, second):
            await push_weights(engine, table(1).items(), 1)
            second.refuses = "they do not fit"
            with pytest.raises(ValueError, match="they do not fit"):
                await push_weights(engine, table(2).items(), 2)
            assert version_of(first.label) == version_of(second.label) == 1 and not first.paused
            for _ in range(4):
                found = await engine.generate([3], SAMPLING)
                assert list(found.token_ids) == continuation(table(1), [3], 6) and found.policy_version == 1

    run(main)


def test_an_answer_from_a_push_that_failed_is_dropped(caplog):
    """One server has loaded the weights when the other is lost, and the push is broken off."""

    async def main():
        async with fleet() as (engine, first, second):
            await push_weights(engine, table(1).items(), 1)
            load = module.load_files

            async def breaks(server, *rest):
                await load(server, *rest)
                raise ValueError("broken off")

            module.load_files = breaks
            try:
                with pytest.raises(ValueError, match="broken off"):
                    await push_weights(engine, table(2).items(), 2, between_steps=True)
            finally:
                module.load_files = load
            assert version_of(first.label) == 2
            asked = asyncio.ensure_future(engine.generate([3], SAMPLING))
            while "no vLLM server serves" not in caplog.text:
                await asyncio.sleep(0.01)
            await push_weights(engine, table(3).items(), 3)
            found = await asked
            assert list(found.token_ids) == continuation(table(3), [3], 6) and found.policy_version == 3

    run(main)


def test_tokens_of_two_versions_are_those_of_complete_pushes():
    async def main():
        async with fleet(1) as (engine, server):
            server.gate.clear()
            asked = asyncio.ensure_future(engine.generate([3], SAMPLING))
            while "/inference/v1/generate" not in server.calls:
                await asyncio.sleep(0.01)
            await engine.begin_push()
            await engine.load_files(module.WeightFiles.write(table(1).items()), 1, between_steps=True)
            server.gate.set()
            await asyncio.sleep(0.05)
            await engine.end_push()
            found = await asked
            assert found.version_runs == ((0, 1), (1, 5)) and found.policy_version == 1
            order = [c for c in server.calls if c in ("/pause", "/update_weights", "/reset_prefix_cache", "/resume")]
            assert order == ["/pause", "/update_weights", "/reset_prefix_cache", "/resume"]

    run(main)


def test_a_restart_that_nobody_saw_is_seen_in_the_answer():
    """The server has the weights of its folder again, and says so: they are loaded from the files of the last push."""

    async def main():
        async with fleet(1) as (engine, server):
            await push_weights(engine, table(1).items(), 1)
            server.restart()
            found = await engine.generate([3], SAMPLING)
            assert list(found.token_ids) == continuation(table(1), [3], 6) and found.policy_version == 1
            assert server.label == engine.held.label

    run(main)


def test_a_server_left_behind_in_a_push_goes_on_when_a_run_starts():
    async def main():
        async with fleet(1) as (engine, server):
            server.paused = True
            other = VLLMServers([server.url], "m", 64)
            other._shapes = engine._shapes
            await other.start()
            assert not server.paused
            await other.close()

    run(main)


def test_an_engine_that_hangs_is_found_by_its_silence(monkeypatch):
    monkeypatch.setattr(clients, "CHECK_S", 2.0)
    monkeypatch.setattr(clients, "POLL_S", 0.05)

    async def main():
        async with fleet(silence_s=0.1) as (engine, first, second):
            first.hangs = True
            found = await asyncio.gather(*(engine.generate([i], SAMPLING) for i in range(6)))
            assert [list(g.token_ids) for g in found] == [continuation(table(0), [i], 6) for i in range(6)]
            assert engine.pool.serving == [engine.pool.servers[1]]
            first.hangs = False
            await whole(engine)

    run(main)


@pytest.mark.parametrize("fault", ["hangs", "is not there", "has died"])
def test_a_server_that_is_down_at_the_start_is_lost_and_comes_back(monkeypatch, fault):
    monkeypatch.setattr(pools, "CHECK_S", 1.0)

    async def main():
        async with StandIn().running() as first, StandIn().running() as second:
            engine = VLLMServers([first.url, second.url], "m", 64)
            engine._shapes = {"scores": (WORDS, WORDS)}, set()
            address, client = first.url, engine._servers[0]
            if fault == "is not there":
                client.url = "http://127.0.0.1:9"
            first.hangs, first.broken_rpc = fault == "hangs", "EngineCore died" if fault == "has died" else ""
            await engine.start()
            assert engine.pool.serving == [engine.pool.servers[1]]
            assert list((await engine.generate([3], SAMPLING)).token_ids) == continuation(table(0), [3], 6)
            first.hangs, first.broken_rpc, client.url = False, "", address
            await whole(engine)
            await engine.close()

    run(main)


def test_a_server_with_another_base_stays_lost_when_it_comes_back():
    async def main():
        async with fleet(adapters=True) as (engine, first, _):
            first.restart()
            first.base = "another folder's"
            engine.pool.lose(engine.pool.servers[0], "it restarted")
            while first.calls.count("describe") < 4:  # once at the start
                await asyncio.sleep(0.01)
            assert "serves other weights" in engine.pool.servers[0].lost
            assert first.calls.count("digest_of_folder") == 2, "its folder is read once after each of its starts"

    run(main)


def test_a_server_in_a_long_push_is_not_taken_for_silent(monkeypatch):
    monkeypatch.setattr(clients, "CHECK_S", 0.1)
    monkeypatch.setattr(clients, "POLL_S", 0.02)

    async def main():
        async with fleet(1, silence_s=0.05) as (engine, server):
            server.gate.clear()
            asked = asyncio.ensure_future(engine.generate([3], SAMPLING))
            while "/inference/v1/generate" not in server.calls:
                await asyncio.sleep(0.01)
            await engine.begin_push()
            await asyncio.sleep(0.5)
            await engine.load_files(module.WeightFiles.write(table(1).items()), 1, between_steps=True)
            server.gate.set()
            await engine.end_push()
            assert (await asked).policy_version == 1 and server.calls.count("/inference/v1/generate") == 1

    run(main)


def test_the_watch_leaves_servers_alone_that_the_start_has_not_checked(monkeypatch, caplog):
    monkeypatch.setattr(pools, "WATCH_S", 0.01)

    async def main():
        async with StandIn().running() as server:
            engine = VLLMServers([server.url], "m", 64)
            engine._shapes = {"scores": (WORDS, WORDS)}, set()
            (client,), post = engine._servers, engine._servers[0].post

            async def slow(*request, **options):
                await asyncio.sleep(0.2)  # the watch looks many times
                return await post(*request, **options)

            monkeypatch.setattr(client, "post", slow)
            await engine.start()
            assert await client.held() == "0-start" and not caplog.text
            await engine.close()

    run(main)


def test_a_server_that_is_silent_in_a_push_is_not_lost(monkeypatch):
    """vLLM answers after the work of the push, which may take longer than a check."""
    monkeypatch.setattr(pools, "WATCH_S", 0.01)

    async def main():
        async with fleet(1) as (engine, _):
            (client,), lost = engine.pool.servers, []
            monkeypatch.setattr(engine.pool, "lose", lambda server, why: lost.append(why))
            asked, pushing, done, held = asyncio.Event(), asyncio.Event(), asyncio.Event(), client.held

            async def silent():
                monkeypatch.setattr(client, "held", held)
                asked.set()
                await pushing.wait()
                done.set()
                raise InfrastructureError("no answer")

            monkeypatch.setattr(client, "held", silent)
            await asked.wait()
            await engine.begin_push()
            pushing.set()
            await done.wait()
            await engine.load_files(module.WeightFiles.write(table(1).items()), 1)
            await engine.end_push()
            assert not lost

    run(main)


def test_a_push_does_not_wait_for_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr(pools, "CHECK_S", 1e4)
    monkeypatch.setattr(pools, "CHECK_LOST_S", 0.1)

    async def main():
        async with fleet() as (engine, first, _):
            first.hangs = True
            engine.pool.lose(engine.pool.servers[0], "a test")
            await push_weights(engine, table(1).items(), 1)
            assert engine.pool.serving == [engine.pool.servers[1]]
            first.hangs = False
            await whole(engine)
            assert first.label == engine.held.label

    run(main)


def test_a_probe_goes_on_without_a_server_that_died():
    async def main():
        async with fleet() as (engine, first, second):
            first.status = 500
            assert list(await engine.probe([3], SAMPLING)) == [second.url]
            assert engine.pool.serving == [engine.pool.servers[1]]
            second.nan = True
            with pytest.raises(PermanentFailure, match="not finite"):
                await engine.probe([3], SAMPLING)

    run(main)


def test_an_answer_without_its_field_loses_the_server_and_not_the_search(monkeypatch):
    async def main():
        async with fleet() as (engine, first, _):
            control = first._control

            async def empty(path, body):
                return {} if path == "/weight_info" else await control(path, body)

            monkeypatch.setattr(first, "_control", empty)
            engine.pool.lose(engine.pool.servers[0], "a test")
            while "has no weight_version; is it vLLM 0.32?" not in engine.pool.servers[0].lost:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(first, "_control", control)
            await whole(engine)

    run(main)


def test_servers_that_took_no_request_do_not_end_it():
    async def main():
        async with fleet(4, retry_s=0.5) as (engine, *_):
            for client in engine.pool.servers:
                client.url = "http://127.0.0.1:9"
            with pytest.raises(InfrastructureError, match="no vLLM server serves") as raised:
                await engine.generate([3], SAMPLING)
            assert not isinstance(raised.value, PermanentFailure)

    run(main)


def test_a_push_breaks_off_the_recovery_of_a_server():
    """The server is loading the weights that it missed when newer ones are pushed: they end under their own label."""

    async def main():
        async with fleet(1) as (engine, server):
            await push_weights(engine, table(1).items(), 1)
            server.restart()
            server.slow.clear()
            asked = asyncio.ensure_future(engine.generate([3], SAMPLING))
            before = server.calls.count("/update_weights")
            while server.calls.count("/update_weights") == before:
                await asyncio.sleep(0.01)
            pushed = asyncio.ensure_future(push_weights(engine, table(2).items(), 2, between_steps=True))
            await asyncio.sleep(0.2)
            server.slow.set()
            await pushed
            found = await asked
            assert list(found.token_ids) == continuation(table(2), [3], 6) and found.policy_version == 2
            assert server.label == engine.held.label and not server.paused

    run(main)


def test_a_server_that_breaks_in_a_push_stays_paused_until_a_whole_one():
    async def main():
        async with fleet() as (engine, first, second):
            await push_weights(engine, table(1).items(), 1)
            first.gate.clear()
            second.gate.clear()
            asked = [asyncio.ensure_future(engine.generate([i], SAMPLING)) for i in range(4)]
            while sum(s.calls.count("/inference/v1/generate") for s in (first, second)) < 4:
                await asyncio.sleep(0.01)
            first.breaks = True
            await push_weights(engine, table(2).items(), 2, between_steps=True)
            first.breaks = False
            first.gate.set()
            second.gate.set()
            found = await asyncio.gather(*asked)
            assert {g.policy_version for g in found} == {2}
            await whole(engine)  # from the files of the push
            assert first.label == second.label == engine.held.label and not first.paused and first.whole

    run(main)


def test_the_weights_of_another_run_are_left_alone():
    async def main():
        async with fleet(1, retry_s=0.3) as (engine, server):
            await push_weights(engine, table(5).items(), 5)
            server.label = "1-another-run"
            with pytest.raises(InfrastructureError, match="another run .1-another-run., .* pushed 5-.*; take another"):
                await engine.generate([3], SAMPLING)
            assert server.label == "1-another-run"
            server.restart()
            assert (await engine.generate([3], SAMPLING)).policy_version == 5

    run(main)


def test_a_restart_is_found_without_a_request(monkeypatch):
    monkeypatch.setattr(pools, "WATCH_S", 0.05)

    async def main():
        async with fleet() as (engine, first, second):
            await push_weights(engine, table(1).items(), 1)
            first.restart()
            while first.label != engine.held.label:
                await asyncio.sleep(0.01)

    run(main)


def test_every_outage_has_its_own_time(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pools, "time", clock)

    async def main():
        async with fleet(1, retry_s=1000.0) as (engine, server):
            client, waits = engine.pool.servers[0], []
            wait = engine.pool.wait

            async def noted(until):
                waits.append(until)
                await wait(until)

            monkeypatch.setattr(engine.pool, "wait", noted)
            server.hangs = True
            engine.pool.lose(client, "the first")
            asked = asyncio.ensure_future(engine.generate([3], SAMPLING))
            while not waits:
                await asyncio.sleep(0.01)
            clock.now = 900.0
            server.gate.clear()
            server.hangs = False
            while "/inference/v1/generate" not in server.calls:
                await asyncio.sleep(0.01)
            server.restart()  # its answer is dropped, and it hangs before it is back
            server.hangs = True
            server.gate.set()
            while waits[-1] == 1000.0:
                await asyncio.sleep(0.01)
            assert waits[-1] == 1900.0
            server.hangs = False
            await asked

    run(main)


def test_a_request_that_servers_do_not_survive_fails():
    async def main():
        async with fleet() as (engine, *servers):
            for server in servers:
                server.status = 500
            with pytest.raises(PermanentFailure, match="3 servers were lost with this request in flight, .*status 500"):
                await engine.generate([3], SAMPLING)

    run(main)


def test_without_any_server_a_request_waits_and_then_says_why():
    async def main():
        async with fleet(1, retry_s=0.3) as (engine, server):
            server.hangs = True
            engine.pool.lose(engine.pool.servers[0], "it is gone")
            with pytest.raises(InfrastructureError, match="no vLLM server serves: http://.*: it is gone"):
                await engine.generate([3], SAMPLING)

    run(main)


def test_logits_that_are_not_finite_fail_the_request_alone():
    async def main():
        async with fleet(1) as (engine, server):
            server.nan = True
            with pytest.raises(PermanentFailure, match="logits are not finite .weights 0-start"):
                await engine.generate([3], SAMPLING)
            server.nan = False
            assert server.tainted and (await engine.generate([3], SAMPLING)).policy_version == 0
            await push_weights(engine, table(1).items(), 1)
            assert not server.tainted

    run(main)


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("logprobs_mode", "raw_logprobs", "has logprobs_mode raw_logprobs; expected processed_logprobs"),
        ("max_length", 63, "takes 63 tokens, not 64"),
        ("generation_config", "auto", "expected vllm: start it with the flags that `make engine` prints"),
        ("lora_rank", 0, 'takes no adapters; start it by `make engine` with ARGS="--lora-rank 16"'),
    ],
)
def test_flags_are_checked_at_the_start(fact, value, said):
    async def main():
        async with StandIn().running() as server:
            server.facts[fact] = value
            engine = VLLMServers([server.url], "m", 64, adapters=True)
            engine._shapes = {"scores": (WORDS, WORDS)}, set()
            with pytest.raises(ValueError, match=said):
                await engine.start()

    run(main)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            "Worker failed with error ''CPUWorker' object has no attribute 'describe''",
            ValueError,
            "was not started with",
        ),
        ("EngineCore encountered an issue", InfrastructureError, "status 500: EngineCore encountered an issue"),
    ],
)
def test_a_stock_server_is_told_from_a_dead_one(error, kind, said):
    async def main():
        async with StandIn().running() as server:
            server.broken_rpc = error
            engine = VLLMServers([server.url], "m", 64)
            engine._shapes = {"scores": (WORDS, WORDS)}, set()
            with pytest.raises(kind, match=said):
                await engine.start()

    run(main)


def test_adapters_are_named_by_requests_and_unloaded_when_none_names_them():
    def adapter(seed):
        return {
            f"model.up.lora_{m}.weight": torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)) for m in "AB"
        }

    async def main():
        async with fleet(adapters=True) as (engine, first, second):
            for version in (1, 2, 3):
                await push_weights(engine, adapter(version).items(), version)
                found = await engine.generate([3], SAMPLING)
                assert found.policy_version == version and not found.version_runs
            names = sorted(first.adapters)
            assert [version_of(name) for name in names] == [2, 3] and sorted(second.adapters) == names
            second.tainted = True
            await push_weights(engine, adapter(4).items(), 4)
            assert not second.tainted
            names = sorted(first.adapters)
            first.restart()
            first.adapters.clear()
            first.paused = True  # a push broke off before it could clear the cache
            first.status = second.status = 404  # vLLM's for a model that it does not know
            engine.pool.lose(engine.pool.servers[0], "it restarted")
            await whole(engine)
            assert sorted(first.adapters) == names[-1:] and not first.paused
            # Another run has pushed whole weights under the adapters.
            first.status = second.status = 200
            first.label = second.label = "9-another"
            with pytest.raises(ValueError, match="another run .9-another., .* pushed adapters; restart the server"):
                await engine.generate([3], SAMPLING)

    run(main)


def test_buckets_are_announced_and_broadcast_and_a_refusal_ends_the_push():
    weights = {name: torch.full((n, 2), float(n)) for n, name in enumerate("abcd", start=1)}

    async def main():
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(StandIn().running()) for _ in range(2)]
            for server in servers:
                server.facts["backend"] = NCCL
            engine = VLLMServers([s.url for s in servers], "m", 64, transport="nccl")
            engine._shapes, engine.nccl = ({"scores": (WORDS, WORDS)}, set()), Sender(40)  # bytes
            await engine.start()
            await push_weights(engine, weights.items(), 1)
            assert [list(bucket) for bucket in engine.nccl.sent] == [["a", "b", "c"], ["d"]]
            assert all(torch.equal(weights[n], t) for bucket in engine.nccl.sent for n, t in bucket.items())
            for server in servers:
                assert server.announced == [
                    (["a", "b", "c"], ["float32"] * 3, [[1, 2], [2, 2], [3, 2]]), (["d"], ["float32"], [[4, 2]])
                ]  # fmt: skip
                assert server.label == engine.held.label and not server.paused and not server.active
            before = engine.held
            servers[1].breaks = engine.nccl.stuck = True
            with pytest.raises(InfrastructureError, match="update_weights: status 500: it breaks"):
                await push_weights(engine, weights.items(), 2, between_steps=True)
            assert engine.nccl._members == () and engine.held == before
            assert all(s.paused and s.label.startswith("incomplete-") for s in servers), "their models are unknown"
            servers[1].breaks = engine.nccl.stuck = False
            await push_weights(engine, weights.items(), 3, between_steps=True)
            assert all(s.label == engine.held.label and not s.paused for s in servers)
            with pytest.raises(ValueError, match="checksum: true works only with transport: files"):
                await push_weights(engine, weights.items(), 4, checksum=True)
            await engine.close()

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": []},
        {"urls": ["localhost:1"]},
        {"urls": ["http://a", "http://a"]},
        {"urls": ["http://a", "http://a/"]},
        {"urls": ["http://a"], "router": "http://a"},
    ],
)
def test_addresses_are_checked(wrong):
    with pytest.raises(ValueError, match="urls: expected different addresses"):
        VLLMServers(model="m", **wrong)


def test_a_password_in_an_address_is_not_printed():
    with pytest.raises(ValueError, match="without a user; the servers' secret is in") as raised:
        VLLMServers(["http://me:secret-word@host:8100"], "m")
    assert "secret-word" not in str(raised.value)


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
