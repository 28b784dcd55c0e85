"""Engine servers, real ones, against the engine in this process's own child and against transformers itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.server_engine import ServerEngine
from rollout.engines.transformers_engine import TransformersEngine
from rollout.engines.weight_transport import HTTPBuckets
from rollout.engines.weights import PREFIX, SHARED_MEMORY
from rollout.trajectory import InfrastructureError
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, random_prompts
from tests.rollout.engines.engine_servers import Running, running

GREEDY = SamplingParams(12, temperature=0)


@pytest.fixture(scope="module")
def staging(tmp_path_factory):
    return tmp_path_factory.mktemp("staging")


@pytest.fixture(scope="module")
def servers(model_dir, staging):
    with running(Running(model_dir, staging), Running(model_dir, staging)) as both:
        yield both


@pytest.fixture
def urls(servers):
    return [server.url for server in servers]


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 120))


async def all_of(engine, prompts, *sampling):
    settings = sampling if len(sampling) == len(prompts) else sampling * len(prompts)
    return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, settings, strict=True)))


def without_cache(generations):
    return [replace(g, cached_tokens=0, logprobs=()) for g in generations]


def test_servers_give_what_an_engine_of_ones_own_gives(urls, model_dir, reference, other_reference):
    prompts = random_prompts(10, seed=30)
    settings = [SamplingParams(16, temperature=1.0, top_p=0.95, seed=i, top_logprobs=3) for i in range(9)] + [GREEDY]

    async def main():
        own = TransformersEngine(str(model_dir), slots=4, max_length=256)
        engine = ServerEngine(urls, str(model_dir), max_length=256)
        await asyncio.gather(own.start(), engine.start())
        try:
            for push in (None, other_reference):
                if push is not None:
                    for one in (own, engine):
                        await one.load_weights(push.weights(), 3)
                here, there = await all_of(own, prompts, *settings), await all_of(engine, prompts, *settings)
                assert without_cache(there)[-1] == without_cache(here)[-1]
                for a, b in zip(here, there, strict=True):
                    assert (a.token_ids, a.finish_reason, a.policy_version) == (b.token_ids, b.finish_reason, b.policy_version)
                    assert a.logprobs == pytest.approx(b.logprobs, abs=LOGPROB_TOLERANCE)
                    assert [set(t) for t in a.top_logprobs or ()] == [set(t) for t in b.top_logprobs or ()]
            await engine.load_weights(reference.weights(), 0)
        finally:
            await asyncio.gather(own.close(), engine.close())

    run(main)
