"""The routes of a weight transfer straight into the engine. vLLM's own takes place on GPUs only: here an engine that
answers when it is told to, and records what it is asked for, stands behind the real server."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from aiohttp.test_utils import TestClient, TestServer

from common.secret import SECRET_VARIABLE
from common.sessions import LoopSession
from rollout.engines.base import Generation, SamplingParams
from rollout.engines.process import EngineProcess
from rollout.engines.server.client import ServerClient
from rollout.engines.server.server import EngineServer
from rollout.engines.server.wire import TokenRequest
from rollout.trajectory import InfrastructureError


class Behind(EngineProcess):
    def __init__(self) -> None:
        super().__init__("none", {}, max_length=64)
        self.asked, self.answers, self.transfers = 0, asyncio.Event(), []
        self._info = {"weight_transfer": "nccl"}

    def check_transfer(self, method):
        pass

    async def generate(self, token_ids, sampling):
        self.asked += 1
        await self.answers.wait()
        return Generation((1,), (-0.5,), "length", 0)

    async def transfer(self, method, arguments, version=None):
        self.transfers.append((method, version))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def hang_up_while_draining_then_do_not_finish():
    engine = Behind()
    server = EngineServer(engine)
    async with TestClient(TestServer(server.app())) as client:

        def generate(weights):
            request = dataclasses.asdict(TokenRequest([1, 2], SamplingParams(1), weights))
            return asyncio.ensure_future(client.post("/generate", json=request))

        first = generate("start")
        await until(lambda: engine.asked == 1)
        assert (await client.post("/transfer/init_weight_transfer_engine", json={})).status == 200
        starting = asyncio.ensure_future(client.post("/transfer/start_weight_update", json={"tag": "next"}))
        await until(lambda: not server._open.is_set())
        starting.cancel()
        second = generate("start")
        await until(lambda: engine.asked == 2)
        engine.answers.set()
        assert [(await one).status for one in (first, second)] == [200, 200] and len(engine.transfers) == 1

        assert (await client.post("/transfer/start_weight_update", json={"tag": "next"})).status == 200
        refused = await generate("start")
        assert refused.status == 409 and "has not finished" in (await refused.json())["error"]
        server.weights.fit("whole", 1)  # as when a push by files follows, from a trainer that has been started anew
        assert (await generate("whole")).status == 200

        for method in ("start_weight_update", "update_weights", "finish_weight_update"):
            body = {"tag": "next"} if method != "update_weights" else {}
            body |= {"version": 2} if method == "finish_weight_update" else {}
            assert (await client.post(f"/transfer/{method}", json=body)).status == 200
        assert (await generate("next")).status == 200 and (await generate("whole")).status == 409
    assert engine.transfers[-1] == ("finish_weight_update", 2) and engine.asked == 4


def test_a_transfer_that_does_not_end_leaves_no_request_waiting():
    asyncio.run(asyncio.wait_for(hang_up_while_draining_then_do_not_finish(), 600))


async def ask_with_and_without_the_secret(monkeypatch):
    engine = Behind()
    server = EngineServer(engine, "the-secret")
    async with TestServer(server.app()) as served:
        client = ServerClient(str(served.make_url("/")), sessions := LoopSession("test"), timeout_s=60)
        for sent in (None, "another"):
            if sent is not None:
                monkeypatch.setenv(SECRET_VARIABLE, sent)
            for path in ("/weights/load", "/generate", "/transfer/start_weight_update"):
                with pytest.raises(InfrastructureError, match="status 401: this server requires its secret"):
                    await client.post(path, {})
        monkeypatch.setenv(SECRET_VARIABLE, "the-secret")
        engine.answers.set()
        assert (await client.generate([1, 2], SamplingParams(1), "start")).token_ids == (1,)
        await sessions.close()
    assert engine.asked == 1 and not engine.transfers and server.weights.refusal is None


def test_whoever_does_not_send_the_servers_secret_is_refused(monkeypatch):
    asyncio.run(asyncio.wait_for(ask_with_and_without_the_secret(monkeypatch), 600))
