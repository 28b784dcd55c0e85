"""A server that answers as ``vllm serve`` does, with a model of one table, for faults that a real one cannot be brought
to on demand. The tests against the real one are in test_vllm_servers.py."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from aiohttp import web
from safetensors.torch import load_file

from rollout.engines.vllm_servers.flags import FILES, MAX_LOGPROBS

WORDS = 40


def table(seed: int) -> dict[str, torch.Tensor]:
    return {"scores": torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))}


def continuation(weights: dict[str, torch.Tensor], ids: list[int], count: int) -> list[int]:
    """Greedy."""
    found = list(ids)
    for _ in range(count):
        found.append(int(weights["scores"][found[-1]].argmax()))
    return found[len(ids) :]


class StandIn:
    """Options that a test sets: ``refuses`` files, ``breaks`` in an update, ``hangs``, ``status`` of answers to
    requests for tokens, ``gate`` of these requests, ``slow`` of updates. ``calls`` has the paths that were asked for.

    Weight updates have vLLM's states: one that has not finished must be ended before the next one, and a model of which
    a part is missing cannot sample."""

    def __init__(self) -> None:
        self.weights, self.label, self.paused = table(0), "default", False
        self.refuses, self.breaks, self.hangs, self.status, self.nan = "", False, False, 200, False
        self.gate, self.slow, self.calls, self.url = asyncio.Event(), asyncio.Event(), [], ""
        self.active, self.whole, self.tainted, self.instance = False, True, False, uuid.uuid4().hex
        self.adapters: dict[str, str] = {}
        self.base = "the folder's"  # digest of the folder that it serves
        self.broken_rpc = ""  # error of every call of a worker's method
        self.announced: list[tuple[list[str], list[str], list[list[int]]]] = []
        self.facts = {
            "model": "stand-in", "max_length": 64, "vocab_size": WORDS, "dtype": "float32", "backend": FILES,
            "logprobs_mode": "processed_logprobs", "max_logprobs": MAX_LOGPROBS, "generation_config": "vllm",
            "lora_rank": 8, "truncation": True, "seeds": True,
        }  # fmt: skip
        self.gate.set()
        self.slow.set()
        self._core = asyncio.Lock()  # vLLM's engine makes one call after the other

    def restart(self) -> None:
        self.weights, self.label, self.instance, self.paused = table(0), "default", uuid.uuid4().hex, False

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.hangs = False
            self.gate.set()
            self.slow.set()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" and await request.read() else {}
        self.calls.append(request.path if request.path != "/collective_rpc" else body["method"])
        while self.hangs:
            await asyncio.sleep(0.01)
        if request.path == "/inference/v1/generate":
            return await self._generate(body)
        async with self._core:
            answer = await self._control(request.path, body)
        if isinstance(answer, str):
            response = web.json_response({"error": {"message": answer}}, status=500)
            response.force_close()  # as uvicorn does after an error
            return response
        return web.json_response(answer)

    async def _control(self, path: str, body: dict) -> dict | str:
        match path:
            case "/weight_info":
                return {"weight_version": self.label}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/v1/models":
                return {"data": [{"id": name, "parent": "m"} for name in self.adapters]}
            case "/collective_rpc" if self.broken_rpc:
                return self.broken_rpc
            case "/collective_rpc":
                return {"results": [getattr(self, f"_{body['method']}")(*body["args"])]}
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/start_weight_update":
                if self.active:
                    return "start_weight_update called while a weight update is already active"
                self.active = True
            case "/update_weights":
                await self.slow.wait()
                if not self.active:
                    return "start_weight_update must be called before update_weights"
                if self.breaks:
                    self.active = self.whole = False
                    return "it breaks"
                info = body["update_info"]
                if "names" in info:  # announced, and broadcast elsewhere
                    self.announced.append((info["names"], info["dtype_names"], info["shapes"]))
                else:
                    (file,) = info["paths"]
                    self.weights, self.whole = load_file(file), True
            case "/finish_weight_update":
                if not self.active:
                    return "finish_weight_update called without a matching start_weight_update"
                self.label, self.active = body["weight_version"], False
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
            case "/reset_prefix_cache":
                pass
            case _:
                return f"no {path}"
        return {"success": True}

    async def _generate(self, body: dict) -> web.Response:
        started = self.label
        await self.gate.wait()
        while self.paused:
            await asyncio.sleep(0.001)
        assert self.whole, "it samples from a model of which a part is missing"
        if self.status != 200:
            return web.json_response({"error": {"message": "the engine is dead"}}, status=self.status)
        count = body["sampling_params"]["max_tokens"]
        ids = continuation(self.weights, body["token_ids"], count)
        spans = [{"version": self.label, "start": 0, "end": count}]
        if started != self.label and count > 1:
            spans = [{"version": started, "start": 0, "end": 1}, {"version": self.label, "start": 1, "end": count}]
        content = [
            {"token_id": i, "logprob": -9999.0 if self.nan else -0.5, "rank": 1, "top_logprobs": []} for i in ids
        ]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length", "stop_reason": None}
        return web.json_response(
            {"choices": [choice | {"weight_versions": spans}], "usage": {}, "model": body.get("model", "stand-in")}
        )

    def _describe(self) -> dict:
        return self.facts | {"instance": self.instance}

    def _shapes(self) -> dict:
        return {"weights": {"scores": [WORDS, WORDS]}, "tied": []}

    def _digest_of_test_file(self, path: str) -> str:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def _digest_of_folder(self) -> str:
        return self.base

    def _refusal_of_files(self, paths: list[str], verify: bool) -> str | None:
        return self.refuses or None

    def _end_broken_update(self) -> None:
        self.active = False

    def _taint(self) -> None:
        self.tainted = True

    def _is_tainted(self) -> dict:
        return {"tainted": self.tainted}

    def _clear_tainted_cache(self) -> None:
        self.tainted = False
