"""A server that answers ``/completions`` and ``/tokenize`` in the shape of vLLM, with a real (tiny) model behind it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollout.serving import serving


class Completions:
    """What vLLM 0.32 says, reduced to what is asked for; choices come in another order than the prompts."""

    most = 20  # vLLM's default of --max-logprobs

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, body: dict[str, Any]) -> Any:
        if body["model"] != "teacher":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        if isinstance(body["prompt"], str):
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None}
        k = body["prompt_logprobs"]
        assert body["max_tokens"] == 1 and body["temperature"] == 0.0
        if k > self.most:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most}"
            return 400, {"error": {"message": message, "code": 400}}
        choices = [
            {"index": i, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": self.of(ids, k)}
            for i, ids in enumerate(body["prompt"])
        ]
        return {"id": "cmpl-1", "object": "text_completion", "model": "teacher", "choices": choices[::-1]}

    def of(self, ids: list[int], k: int) -> list[Any]:
        """The prompt's token, and the k likeliest."""
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found: list[Any] = [None]
        for i, token in enumerate(ids[1:]):
            rank = int((logprobs[i] > logprobs[i, token]).sum()) + 1
            ranks = {token: rank} | {int(likely): r + 1 for r, likely in enumerate(logprobs[i].topk(k).indices)}
            found.append(
                {
                    str(one): {"logprob": float(logprobs[i, one]), "rank": r, "decoded_token": "?"}
                    for one, r in ranks.items()
                }
            )
        return found


@contextmanager
def served(answer):
    """``serving(answer)`` in a thread of its own: those who ask block theirs."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    seen: list[Any] = []

    async def main():
        async with serving(answer) as server:
            seen.append(server)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield seen[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
