"""Weights into an engine of one's own: through a shared buffer, by files, in the engine's type."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import shutil
import weakref
from collections import namedtuple

import pytest
import torch

from rollout.engines.base import SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.weights import files, ipc
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, generate, random_prompts
from tests.rollout.engines.pushing import push_weights

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
GREEDY = SamplingParams(12, temperature=0)


class Strict:
    """Refuses what CUDA and vLLM's worker refuse: a handle whose memory was freed, an update before its start, a start
    in an update, steps without a buffer. It copies late, as a GPU may, but before it answers."""

    def __init__(self, shapes, transport="ipc", memory="cpu", opens=True, fails=False) -> None:
        self.info = {"weights": shapes, "tied": ["tied"], "dtype": "bfloat16", "ipc_memory": memory}
        self.transport, self.opens, self.fails = transport, opens, fails
        self.handle, self.updating, self.asked, self.got, self.version = None, False, [], {}, None

    async def transfer(self, method, arguments, version=None, between_steps=True):
        self.asked.append(method.split("_")[0])
        if method == "init_weight_transfer_engine":
            if not self.opens:
                raise ValueError(
                    "init_weight_transfer_engine failed in the engine:\nCUDA error: invalid resource handle"
                )
            self.handle = arguments["init_info"]["handle"]
            if isinstance(self.handle, str):
                mapped = torch.from_file(
                    self.handle, shared=True, size=arguments["init_info"]["size"], dtype=torch.uint8
                )
                self.handle = lambda: mapped
            return
        if self.handle is None or self.handle() is None:
            raise ValueError("CUDA error: invalid resource handle")
        if self.updating == (method == "start_weight_update"):
            raise ValueError(f"{method}: a weight update is {'' if self.updating else 'not '}active")
        if method == "update_weights":
            await asyncio.sleep(0.01)
            if self.fails:
                raise ValueError("update_weights failed in the engine")
            info = arguments["update_info"]
            for name, dtype, shape, offset in zip(*(info[k] for k in ("names", "dtype_names", "shapes", "offsets")),
                                                  strict=True):  # fmt: skip
                self.got[name] = ipc.view(self.handle(), offset, getattr(torch, dtype), shape).clone()
        self.updating = method != "finish_weight_update"
        if not self.updating:
            self.version, self.handle = version, None

    async def load_files(self, given, version, between_steps=False):
        self.asked.append("files")
        self.got, self.version = dict(given.tensors()), version


@pytest.fixture
def buffers(monkeypatch):
    """Buffers as on a GPU: handles do not keep the memory. Yields the sizes."""
    sizes = []

    @contextlib.contextmanager
    def shared(size, device):
        buffer = torch.zeros(size, dtype=torch.uint8)
        sizes.append(size)
        yield buffer, weakref.ref(buffer)

    monkeypatch.setattr(ipc, "_shared", shared)
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 2048)
    return sizes


def weights(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(20, 30, generator=generator) for i in range(count)} | {"tied": torch.zeros(4, 5)}


def shapes(given):
    return {name: tuple(tensor.shape) for name, tensor in given.items()}


def test_a_bucket_at_a_time_and_each_lives_until_it_is_copied(buffers):
    given = weights() | {"large": torch.randn(40, 50)}
    engine = Strict(shapes(given))
    for version in (1, 2):
        asyncio.run(push_weights(engine, iter(given.items()), version, checksum=True))
    assert engine.asked == ["init", "start", *["update"] * 3, "finish"] * 2 and engine.version == 2
    assert buffers == [40 * 50 * 2 + ipc.ALIGNMENT] * 2, "the largest tensor, not the model"
    assert engine.got.keys() == given.keys() - {"tied"}
    for name, tensor in engine.got.items():
        assert torch.equal(tensor, given[name].bfloat16())


@pytest.mark.parametrize("damage", ["shape", "missing", "raises"])
def test_what_does_not_fit_is_refused_and_a_whole_push_mends_it(buffers, damage):
    given = weights()
    engine = Strict(shapes(given))
    wrong = list(given.items())
    if damage == "shape":
        wrong[0] = ("layer.0", torch.zeros(30, 20))
    elif damage == "unknown":
        wrong[5] = ("layer.9", torch.zeros(20, 30))
    elif damage == "missing":
        del wrong[3]
    elif damage == "twice":
        wrong[5] = wrong[0]

    def tensors():
        yield from wrong[:5]
        if damage == "raises":
            raise ZeroDivisionError("gathering failed")
        yield from wrong[5:]

    with pytest.raises(ZeroDivisionError if damage == "raises" else ValueError, match="fit the engine's|gathering"):
        asyncio.run(push_weights(engine, tensors(), 1))
    assert engine.version is None and "finish" not in engine.asked
    assert damage != "shape" or engine.asked == ["init"], "the model was not touched"
    engine.updating = False  # as `VLLMBackend` abandons it
    asyncio.run(push_weights(engine, given.items(), 2))
    assert engine.version == 2


def test_files_in_the_engines_type_where_memory_is_not_shared(buffers, caplog):
    given = {"layer.0": torch.randn(3, 4)}
    for options in ({"memory": None}, {"opens": False}, {"opens": False}, {"memory": "GPU-1"}):
        engine = Strict(shapes(given), transport="auto", **options)
        asyncio.run(push_weights(engine, given.items(), 3))
        assert engine.asked[-1] == "files" and engine.version == 3
        assert torch.equal(engine.got["layer.0"], given["layer.0"].bfloat16())
    told = [record.message for record in caplog.records]
    assert len(told) == 2 and "invalid resource handle" in told[0] and "are in cpu, the engine's in GPU-1" in told[1]
    with pytest.raises(
        ValueError, match="ipc cannot be used: the trainer.s weights are in cpu, .* take transport: auto"
    ):
        asyncio.run(push_weights(Strict(shapes(given), memory=None), given.items(), 3))


def test_little_shared_memory_is_told_once_with_the_cure(monkeypatch, caplog, tmp_path):
    sizes = namedtuple("sizes", "total used free")(64 << 20, 60 << 20, 4 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: sizes)
    files._warn_of_little_room.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            written = files.WeightFiles.write([("a", torch.zeros(8))])
            assert not written.paths[0].startswith(str(files.SHARED_MEMORY))
            written.remove()
    assert [record.message for record in caplog.records if "4 of 64 MiB free" in record.message and
            "--shm-size=8g" in record.message] == [caplog.records[0].message]  # fmt: skip


def a_rank(rank, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    given = weights()
    engine = Strict(shapes(given))
    asyncio.run(push_weights(engine, given.items(), 1))
    assert engine.version == 1 and len(engine.got) == 6, "each fills its own engine's buffer"
    engine = Strict(shapes(given), transport="auto", opens=rank == 0)
    asyncio.run(push_weights(engine, given.items(), 2))
    assert engine.version == 2 and engine.asked == ["init", "files"], "all by files where one cannot"
    engine, left = Strict(shapes(given), fails=rank == 1), iter(given.items())
    with pytest.raises(ValueError, match="rank 1: update_weights failed"):
        asyncio.run(push_weights(engine, left, 3))
    assert not list(left), "gathered to the end, as the other rank waits for that"
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_fill_their_own_engines_and_agree_on_the_way(tmp_path):
    torch.multiprocessing.spawn(a_rank, (str(tmp_path / "store"),), nprocs=2)


# ------------------------------------------------------------------ vLLM itself, its buffer in shared memory
@pytest.fixture(scope="module")
def engine(model_dir):
    engine = VLLMEngine(str(model_dir), max_length=256, kv_cache_bytes=32 << 20, transport="ipc", request_seeds=False)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@needs_vllm
@pytest.mark.slow
def test_vllm_takes_layers_that_come_in_parts(engine, reference, other_reference, monkeypatch):
    """A push that breaks off leaves parts of layers in vLLM, which must not count for the next."""
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 1)  # so many bytes as the largest tensor has
    prompts = random_prompts(3, seed=22, longest=100)

    def breaks_off(reference):
        given = list(reference.weights())
        return [*given[: len(given) // 2], (given[-1][0], torch.zeros(3))]

    for version, truth in enumerate((reference, other_reference, reference), 1):
        with pytest.raises(ValueError, match="do not fit"):
            asyncio.run(push_weights(engine, breaks_off(truth), version))
        asyncio.run(push_weights(engine, truth.weights(), version, checksum=True))
        generations = generate(engine, prompts, GREEDY)
        assert [list(g.token_ids) for g in generations] == [truth.greedy(p, 12) for p in prompts]
        assert {g.policy_version for g in generations} == {version}
        gaps = [truth.largest_gap(p, g) for p, g in zip(prompts, generations, strict=True)]
        assert max(gaps) < LOGPROB_TOLERANCE


@needs_vllm
@pytest.mark.slow
def test_requests_finish_before_a_push_and_later_ones_wait(engine, reference, other_reference, monkeypatch):
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 1)
    prompt, later = random_prompts(2, seed=5, longest=20)
    asyncio.run(push_weights(engine, reference.weights(), 1))

    async def main():
        before = asyncio.ensure_future(engine.generate(prompt, SamplingParams(200)))
        await asyncio.sleep(0)
        pushing = asyncio.ensure_future(push_weights(engine, other_reference.weights(), 2))
        await asyncio.sleep(0.05)
        after = asyncio.ensure_future(engine.generate(later, GREEDY))
        await pushing
        return await before, await after

    before, after = asyncio.run(main())
    assert (before.policy_version, before.version_runs) == (1, ())
    assert reference.largest_gap(prompt, before) < LOGPROB_TOLERANCE
    assert list(after.token_ids) == other_reference.greedy(later, 12) or after.policy_version == 1


@needs_vllm
@pytest.mark.slow
def test_without_seeds_of_requests_the_engine_draws(engine):
    prompt, sampling = random_prompts(1, seed=6)[0], SamplingParams(30, seed=1)
    first, second = (generate(engine, [prompt], sampling)[0].token_ids for _ in range(2))
    assert first != second and not engine.info["request_seeds"]
