from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from rollout.engines.base import SamplingParams
from rollout.trajectory import InfrastructureError
from tests.rollout.engines.pushing import push_weights
from tests.rollout.scripted_engine import ScriptedEngine

TEN = SamplingParams(max_new_tokens=10)


def test_scripts_as_function_table_and_list():
    async def main():
        for script in (lambda ids, sampling: [ids[0] + 1], {(1,): [2], (5,): [6]}, [[2], [6]]):
            engine = ScriptedEngine(script, logprob=-0.25)
            await engine.start()
            first, second = await engine.generate([1], TEN), await engine.generate([5], TEN)
            assert (first.token_ids, second.token_ids) == ((2,), (6,))
            assert first.logprobs == (-0.25,)
        assert [r.token_ids for r in engine.requests] == [(1,), (5,)]

    asyncio.run(main())


def test_replies_are_cut_as_a_real_engine_would(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    async def main():
        text = "<search> Mira Voss </search> and more"
        engine = ScriptedEngine(lambda ids, sampling: text, tokenizer)
        await engine.start()
        stopped = await engine.generate([1], SamplingParams(100, stop=("</search>",)))
        assert tokenizer.decode(stopped.token_ids).startswith("<search> Mira Voss </search>")
        assert (stopped.finish_reason, stopped.stop_string) == ("stop", "</search>")
        ids = tokenizer.encode(text)
        assert len(stopped.token_ids) < len(ids)
        ended = await engine.generate([1], SamplingParams(100, stop_token_ids=(ids[2],)))
        assert (list(ended.token_ids), ended.finish_reason) == (ids[:3], "eos")
        short = await engine.generate([1], SamplingParams(2))
        assert (list(short.token_ids), short.finish_reason) == (ids[:2], "length")

    asyncio.run(main())


def test_latency_concurrency_weights_and_death():
    async def main():
        engine = ScriptedEngine(lambda ids, sampling: ids, latency=lambda ids: 0.01 * ids[0])
        with pytest.raises(InfrastructureError):
            await engine.generate([1], TEN)
        await engine.start()
        order = []

        async def one(i):
            await engine.generate([i], TEN)
            order.append(i)

        await asyncio.gather(*(one(i) for i in (3, 1, 2)))
        assert order == [1, 2, 3]
        assert engine.peak_concurrency == 3
        await push_weights(engine, [("w", torch.zeros(2, 3))], 7)
        assert engine.weights == {"w": (2, 3)}
        assert (await engine.generate([1], TEN)).policy_version == 7
        waiting = asyncio.ensure_future(engine.generate([5], TEN))
        await asyncio.sleep(0.01)
        engine.kill()
        with pytest.raises(InfrastructureError):
            await waiting
        await engine.close()
        assert engine.policy_version == 0
        failing = ScriptedEngine([RuntimeError("scripted")])
        await failing.start()
        with pytest.raises(RuntimeError, match="scripted"):
            await failing.generate([1], TEN)

    asyncio.run(main())
