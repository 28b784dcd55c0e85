"""What the engine server refuses, request by request, and that it goes on serving: real HTTP, a real engine process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal

import aiohttp
import pytest
import torch

from rollout.engines.server import server as module
from rollout.engines.server.server import EngineServer
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY, WeightFiles
from tests.raw_http import check_unreadable
from tests.rollout.engines.dying_backend import DyingEngine, table
from tests.rollout.engines.test_engine_process import echo

RIGHT = {"token_ids": [1], "sampling": {"max_new_tokens": 3, "seed": 1}, "weights": "start"}
LOAD = {"tag": "t", "version": 1, "paths": ["/nowhere"]}


class Door:
    """A server over one engine's process, and a client of it."""

    def __init__(self, engine, client, server, address):
        self.engine, self._client, self.server, self.address = engine, client, server, address

    async def ask(self, path, body, **options):
        """Status and answer. An error is one line."""
        if body is not None and "data" not in options:
            options["data"] = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._client.request("GET" if body is None else "POST", path, **options) as response:
            answer = await response.json()
        assert response.status == 200 or (answer["error"] and "\n" not in answer["error"])
        return response.status, answer

    async def tokens(self, weights):
        status, answer = await self.ask("/generate", RIGHT | {"weights": weights})
        return answer["token_ids"] if status == 200 else status


@contextlib.asynccontextmanager
async def door(tmp_path, engine=None, **options):
    engine = engine or DyingEngine(log=str(tmp_path / "log"), **options)
    await engine.start()
    server, listener = EngineServer(engine), module.bind("127.0.0.1", 0)
    host, port = listener.getsockname()
    runner = await server.start(listener)
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield Door(engine, client, server, (host, port))
    finally:
        await runner.cleanup()
        await engine.close()


def run(main):
    asyncio.run(asyncio.wait_for(main, 3600))


def sampling(**values):
    return RIGHT | {"sampling": RIGHT["sampling"] | values}


WRONG = [
    ("/generate", b"", 400, "EOF"),
    ("/generate", b"\xff\xfe", 400, ""),
    ("/generate", b"[" * 100_000, 400, "recursion"),
    ("/generate", [], 400, "the body: Input should be an object; found \\[\\]"),
    ("/generate", b'{"token_ids": [1' + b"0" * 10_000 + b"]}", 400, "number out of range"),
    ("/generate", RIGHT | {"token_ids": []}, 400, "token_ids"),
    ("/generate", RIGHT | {"token_ids": [1.5]}, 400, "token_ids.0"),
    ("/generate", RIGHT | {"token_ids": [True]}, 400, "token_ids.0"),
    ("/generate", RIGHT | {"token_ids": [-1]}, 400, "token_ids.0"),
    ("/generate", RIGHT | {"token_ids": [40]}, 400, "expected 0 to 39"),
    ("/generate", RIGHT | {"token_ids": [2**80]}, 400, "token"),
    ("/generate", RIGHT | {"more": 1}, 400, "more: Unexpected"),
    ("/generate", RIGHT | {"weights": None}, 400, "weights"),
    ("/generate", RIGHT | {"weights": "x" * 300}, 400, "weights: .* at most 200"),
    ("/generate", RIGHT | {"token_ids": [-1] * 200_000}, 400, "token_ids.0"),
    ("/generate", sampling(stop=[f"{i}" for i in range(100_000)]), 400, "sampling.stop: .* at most 64"),
    ("/generate", sampling(stop=["x" * 10**6]), 400, "sampling.stop.0.: .* at most 256 characters"),
    ("/generate", sampling(logit_bias={"1": 1e9}), 400, "sampling.logit_bias: Unexpected"),
    ("/generate", sampling(top_k=2**40), 400, "sampling.top_k"),
    ("/generate", sampling(top_logprobs=10**6), 400, "sampling.top_logprobs"),
    ("/generate", sampling(seed=2**70), 400, "sampling.seed"),
    ("/generate", sampling(temperature=float("nan")), 400, "sampling.temperature"),
    ("/generate", sampling(temperature=float("inf")), 400, "sampling.temperature"),
    ("/generate", sampling(top_p=float("nan")), 400, "sampling.top_p"),
    ("/generate", sampling(repetition_penalty=0), 400, "sampling.repetition_penalty"),
    ("/generate", sampling(max_new_tokens=10**9), 400, "exceed the engine's max_length"),
    ("/generate", sampling(max_new_tokens="3"), 200, ""),  # a number all the same
    ("/generate", sampling(seed=-1), 400, "sampling.seed"),
    ("/generate", sampling(stop="</a>"), 400, "sampling.stop"),
    ("/weights/sees", {}, 400, "path"),
    ("/weights/sees", {"path": 3}, 400, "path: Input should be a valid string; found 3"),
    ("/weights/load", LOAD, 422, "/nowhere is not a weight file"),
    ("/weights/load", LOAD | {"paths": [f"/{PREFIX}" + "x" * 5000]}, 422, "not a weight file"),
    ("/weights/load", LOAD | {"paths": []}, 400, "paths"),
    ("/weights/load", LOAD | {"paths": "/nowhere"}, 400, "paths"),
    ("/weights/load", LOAD | {"version": 1.5}, 400, "version"),
    ("/weights/load", LOAD | {"tag": ""}, 400, "tag"),
    ("/transfer/start_weight_update", {"tag": "t"}, 400, "takes weights by files"),
    ("/transfer/sleep", {}, 400, "not a call of a weight transfer"),
    ("/transfer/update_weights", {"arguments": []}, 400, "arguments"),
    ("/weights/copy", {}, 404, "Not Found"),
    ("/health", {}, 405, "Not Allowed"),
]


def test_wrong_requests_are_refused_one_by_one(tmp_path):
    async def main():
        async with door(tmp_path, restarts=0) as at:
            right, at.engine.info["weight_transfer"] = await at.tokens("start"), None
            for path, body, status, said in WRONG:
                found, answer = await at.ask(path, body)
                assert found == status, (path, body, answer)
                if status != 200:
                    assert re.search(said, answer["error"]), answer
            status, _ = await at.ask("/generate", RIGHT, headers={"Content-Type": "application/json; charset=none"})
            assert status == 200 and not at.server.failed.is_set() and await at.tokens("start") == right

    run(main())


def test_requests_that_cannot_be_read_get_one_line_and_leave_no_traceback(tmp_path, caplog):
    async def main():
        listener = module.bind("127.0.0.1", 0)
        runner = await EngineServer(DyingEngine(log=str(tmp_path / "log"))).start(listener)  # none reaches the engine
        await check_unreadable(*listener.getsockname(), "/generate", "error", wrong_body=400)
        await runner.cleanup()

    run(main())
    assert not any(record.exc_info for record in caplog.records)


def test_large_slow_and_idle(tmp_path, monkeypatch, caplog):
    async def never():
        yield b"{"
        await asyncio.Event().wait()

    async def main():
        async with door(tmp_path) as at:
            status, answer = await at.ask("/generate", b"[" + b" " * (2 << 20) + b"]")
            assert status == 413 and "Maximum request body size" in answer["error"]
            monkeypatch.setattr(module, "BODY_S", 0.3)
            status, answer = await at.ask("/generate", b"", data=never())
            assert status == 408 and "did not arrive within 0.3 s" in answer["error"]
            monkeypatch.setattr(module, "IDLE_S", 0.3)
            listener = module.bind("127.0.0.1", 0)
            runner = await EngineServer(at.engine).start(listener)
            for sent in (b"", b"POST /generate HTTP/1.1\r\nHost: "):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(sent)
                assert await reader.read() == b"", "closed from there"
                writer.close()
            await runner.cleanup()
            assert (await at.ask("/health", None))[0] == 200 and not any(record.exc_info for record in caplog.records)

    run(main())


def order(files, tag, version):
    return {"tag": tag, "version": version, "paths": files.paths}


def test_torn_and_broken_weights_are_refused_and_the_old_ones_go_on_serving(tmp_path):
    async def main():
        async with door(tmp_path, restarts=0) as at:
            good, other = (WeightFiles.write(table(seed).items()) for seed in (1, 2))
            assert (await at.ask("/weights/load", order(good, "good", 1)))[0] == 200
            tokens = await at.tokens("good")
            torn, changed, broken = (
                WeightFiles.write(t.items(), checksum=True)
                for t in (table(3), table(3), table(3) | {"b": torch.full((40, 40), float("nan"))})
            )
            with open(torn.paths[0], "r+b") as file:
                file.truncate(1000)
            with open(changed.paths[0], "r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x55")
            gone = SHARED_MEMORY / f"{PREFIX}1-empty.safetensors"
            gone.touch()
            for files, said in (
                (torn, "cannot be read as weights"),
                (changed, "changed in transfer"),
                (broken, "not finite: 1600 of 1600 numbers of b"),
                (WeightFiles([str(gone)]), "cannot be read as weights"),
            ):
                status, answer = await at.ask("/weights/load", order(files, "next", 2))
                assert status == 422 and said in answer["error"], answer
                assert await at.tokens("good") == tokens and await at.tokens("next") == 409
            # The tag that is held: again is fine, with others it is not.
            assert (await at.ask("/weights/load", order(good, "good", 1)))[0] == 200
            for wrong in (order(other, "good", 1), order(good, "good", 2)):
                status, answer = await at.ask("/weights/load", wrong)
                assert status == 422 and "push good is held already, as version 1" in answer["error"]
            assert await at.tokens("good") == tokens
            for files in (good, other, torn, changed, broken):
                files.remove()
            gone.unlink()

    run(main())


@pytest.mark.slow
def test_an_engine_that_dies_behind_a_server_says_that_it_needs_its_weights(tmp_path):
    async def main():
        async with door(tmp_path) as at:
            start = await at.tokens("start")
            os.kill(at.engine.pid, signal.SIGKILL)
            assert await at.tokens("start") == start, "its folder's weights are what it should hold"
            files = WeightFiles.write(table(1).items())
            await at.ask("/weights/load", order(files, "good", 1))
            tokens, before = await at.tokens("good"), (await at.ask("/health", None))[1]
            os.kill(at.engine.pid, signal.SIGKILL)
            assert await at.tokens("good") == 409
            after = (await at.ask("/health", None))[1]
            assert "are not kept" in after["refusal"] and after["instance"] != before["instance"]
            # As a trainer does that finds a server so (`ServerPool`): with the same tag, from its files.
            again = order(files, "good", 1) | {"replaces": after["weights"]}
            assert (await at.ask("/weights/load", again))[0] == 200 and await at.tokens("good") == tokens
            assert not at.server.failed.is_set()
            files.remove()

    run(main())


@pytest.mark.slow
def test_a_request_that_ends_the_engine_does_not_end_the_server(tmp_path):
    async def main():
        async with door(tmp_path, echo(restarts=2)) as at:
            status, answer = await at.ask("/generate", RIGHT | {"token_ids": [14]})
            assert status == 500 and "died 2 times with this request" in answer["error"]
            assert await at.tokens("start") == [1] and not at.server.failed.is_set()

    run(main())


@pytest.mark.slow
def test_a_transfer_whose_sender_is_gone_does_not_stop_the_server_for_good(tmp_path, monkeypatch):
    async def main():
        async with door(tmp_path, restarts=0) as at:
            right, buffer = await at.tokens("start"), SHARED_MEMORY / f"{PREFIX}{os.getpid()}-buffer"
            buffer.write_bytes(bytes(100_000))
            init = {"arguments": {"init_info": {"handle": str(buffer), "size": 100_000}}}
            status, answer = await at.ask("/transfer/start_weight_update", {"tag": "next"})
            assert status == 400 and "expected init_weight_transfer_engine before" in answer["error"]
            assert await at.tokens("start") == right
            for _ in range(2):  # more often than an engine of no restarts may die
                monkeypatch.setattr(module, "SENDER_S", 600.0)
                assert (await at.ask("/transfer/init_weight_transfer_engine", init))[0] == 200
                status, answer = await at.ask("/transfer/update_weights", {})
                assert status == 400 and "expected start_weight_update before" in answer["error"]
                assert (await at.ask("/transfer/start_weight_update", {"tag": "next"}))[0] == 200
                assert await at.tokens("start") == 409
                monkeypatch.setattr(module, "SENDER_S", 0.01)
                status, answer = await at.ask("/transfer/update_weights", {})  # the last that is heard of it
                assert status == 400 and "KeyError" in answer["error"]
                while (await at.ask("/health", None))[1]["refusal"]:
                    await asyncio.sleep(0.05)
                assert await at.tokens("start") == right
            buffer.unlink()

    run(main())
