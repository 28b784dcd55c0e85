"""What the engines must equal: transformers' own forward pass and `generate`, computed here, outside any engine."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from common.secret import SECRET_VARIABLE
from tests.conftest import make_model_dir
from tests.rollout.engines.vllm_processes import SECRET, Running, running

LOGPROB_TOLERANCE = 1e-4  # float32, sampler against a plain forward pass


class Reference:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def weights(self):
        return self.model.named_parameters()

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], new: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
        """[n, V] log-probs at the positions of ``new``."""
        logits = self.model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, dim=-1)

    def largest_gap(self, prompt: list[int], generation, temperature: float = 1.0) -> float:
        expected = self.logprobs(prompt, generation.token_ids, temperature)
        chosen = expected.gather(1, torch.tensor(generation.token_ids).unsqueeze(1)).squeeze(1)
        return (chosen - torch.tensor(generation.logprobs)).abs().max().item()


def generate(engine, prompts, sampling):
    """What the engine makes of all prompts at once."""

    async def main():
        return await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))

    return asyncio.run(main())


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(400) for _ in range(draw.randrange(2, longest))] for _ in range(count)]


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory) -> Path:
    """Other weights for the model of ``model_dir``."""
    return make_model_dir(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("untied"), seed=8, tie=False)


@pytest.fixture(scope="session")
def other_untied_dir(tmp_path_factory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("other_untied"), seed=9, tie=False)


@pytest.fixture(scope="session")
def reference(model_dir) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="session")
def other_reference(other_dir) -> Reference:
    return Reference(other_dir)


@pytest.fixture(scope="module")
def servers(model_dir):
    """Two vLLM servers of one model, which take adapters and demand a secret, for all tests of a file."""
    with running(Running(model_dir, lora_rank=8), Running(model_dir, lora_rank=8)) as both:
        yield both


@pytest.fixture
def urls(servers, monkeypatch):
    """The servers' addresses. This process has their secret."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    return [server.url for server in servers]
