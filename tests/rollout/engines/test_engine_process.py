"""The process wrapper, with real child processes and real kills; `EchoBackend` stands in for the model."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from common.run_folder import run_folder
from rollout.engines.base import SamplingParams
from rollout.engines.child import Child
from rollout.engines.process import ROOT, EngineProcess
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY, WeightFiles, remove_leftovers
from rollout.trajectory import InfrastructureError
from tests.processes import alive, gone_within
from tests.rollout.engines.pushing import push_weights

ONE = SamplingParams(max_new_tokens=1)
UNFIT_NUMBERS = (math.nan, math.inf, -math.inf, -5, True, "x", None)


def echo(threads: int = 1, restarts: int = 0, **options) -> EngineProcess:
    path = "tests.rollout.engines.echo_backend.EchoBackend"
    return EngineProcess(path, options, max_length=50, threads=threads, restarts=restarts)


class HeldConnection:
    """A connection whose ``send`` waits for ``release`` and then notes whether the connection is closed."""

    def __init__(self, connection) -> None:
        self.connection, self.closed_at_send = connection, []
        self.sending, self.release = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def send(self, message) -> None:
        self.sending.set()
        self.release.wait()
        self.closed_at_send.append(self.connection.closed)


def test_the_connection_of_a_dead_child_stays_open_until_its_writer_has_ended():
    """A writer that is behind would write to the same file descriptor, which by then may belong to the next child."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = Child(("tests.rollout.engines.echo_backend.EchoBackend", {}, 1), environment, os.getpid())
    child.ready(600)
    held = child._connection = HeldConnection(child._connection)
    ended = threading.Event()
    child.begin(lambda results: None, lambda child: ended.set(), lambda: False, 600)
    child.process.kill()
    held.sending.wait()
    assert not ended.wait(0.3)
    held.release.set()
    ended.wait()
    assert held.closed_at_send == [False] and held.closed


def test_requests_weights_and_an_end():
    async def main():
        engine = echo(threads=2, seconds=0.02)
        with pytest.raises(InfrastructureError, match="not been started"):
            await engine.generate([1], ONE)
        random.seed(5)
        torch.manual_seed(5)
        expected_numbers, expected_threads = torch.rand(3).tolist(), torch.get_num_threads()
        torch.manual_seed(5)
        await asyncio.gather(engine.start(), engine.start())
        pid = engine.pid
        assert engine.info["threads"] == 2 and engine.info["tmp"] == str(run_folder()), "vLLM leaves files in it"
        assert (torch.rand(3).tolist(), torch.get_num_threads()) == (expected_numbers, expected_threads)
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole process group; the child leaves it to the parent

        generations = await asyncio.gather(*(engine.generate([i, 7], ONE) for i in range(12)))
        assert [g.token_ids for g in generations] == [(i, 7) for i in range(12)]

        # Requests before a load are answered by the old weights, later ones by the new.
        before = [asyncio.ensure_future(engine.generate([i], ONE)) for i in range(3)]
        await asyncio.sleep(0)
        files = WeightFiles.write([("weight", torch.ones(2, 2))])
        load = asyncio.ensure_future(engine.load_files(files, version=4))
        await asyncio.sleep(0)
        after = [asyncio.ensure_future(engine.generate([i], ONE)) for i in range(3)]
        await load
        files.remove()
        assert [(await f).policy_version for f in before] == [0, 0, 0]
        assert [(await f).policy_version for f in after] == [4, 4, 4]

        for wrong in (("weight", torch.ones(2, 3)), ("weigth", torch.ones(2, 2))):
            with pytest.raises(ValueError, match="do not fit"):
                await push_weights(engine, [wrong], version=5)
        assert (await engine.generate([1], ONE)).policy_version == 4

        # A cancelled request leaves the queue: the last one (id 15) counts what is behind it, here nothing.
        doomed = [asyncio.ensure_future(engine.generate([i], ONE)) for i in range(5)]
        await asyncio.sleep(0)
        for future in doomed:
            future.cancel()
        assert (await engine.generate([15], ONE)).token_ids == (0,)
        # A cancelled load still takes place.
        files = WeightFiles.write([("weight", torch.ones(2, 2))])
        cancelled = asyncio.ensure_future(engine.load_files(files, version=9))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert (await engine.generate([1], ONE)).policy_version == 9
        files.remove()
        assert not list(SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))
        await engine.close()
        await engine.close()
        assert not alive(pid)
        with pytest.raises(InfrastructureError):
            await engine.generate([1], ONE)
        await engine.start()  # again, a new process
        assert (await engine.generate([3], ONE)).token_ids == (3,)
        await engine.close()

    asyncio.run(main())


def test_malformed_requests_never_reach_the_child():
    engine = echo()
    engine._info = {"vocab_size": 100}
    for ids, sampling, message in (
        ([], ONE, "empty"),
        ([1], SamplingParams(max_new_tokens=0), "sampling.max_new_tokens: .* greater than or equal to 1; found 0"),
        ([1] * 100_000, ONE, "100000 given . 1 new tokens exceed"),
        ([1], SamplingParams(10**9), "1 given . 1000000000 new tokens exceed"),
        ([1] * 45, SamplingParams(max_new_tokens=6), "45 given . 6 new tokens exceed the engine's max_length 50"),
        ([1, 100], ONE, "from 1 to 100; expected 0 to 99"),
        ([1, -1], ONE, "from -1 to 1"),
        *(([1], SamplingParams(1, temperature=value), "sampling.temperature: ") for value in UNFIT_NUMBERS),
        (
            [1],
            SamplingParams(1, temperature=0.005),
            r"sampling.temperature: Input should be 0 .greedy. or at least 0.01",
        ),
        ([1], SamplingParams(1, temperature=2.5), "sampling.temperature: .* less than or equal to 2; found 2.5"),
        *(([1], SamplingParams(1, top_p=value), "sampling.top_p: ") for value in (*UNFIT_NUMBERS, 0.0, 1.5)),
        *(([1], SamplingParams(1, top_k=value), "sampling.top_k: ") for value in (*UNFIT_NUMBERS, 0, -2, 2.5, 2**31)),
        *(
            ([1], SamplingParams(1, repetition_penalty=value), "sampling.repetition_penalty: ")
            for value in (*UNFIT_NUMBERS, 0.0, 1e-300, 1e300)
        ),
        *(([1], SamplingParams(1, seed=value), "sampling.seed: ") for value in (-4, 2**63, 10**4000, math.nan)),
        *(([1], SamplingParams(1, top_logprobs=value), "sampling.top_logprobs: ") for value in (-1, 65, 10**9)),
        *(
            ([1], SamplingParams(1, stop_token_ids=ids), "stop_token_ids")
            for ids in ((-1,), (100,), (2**70,), (1,) * 257)
        ),
        ([1], SamplingParams(1, stop=tuple(map(str, range(100_000)))), "sampling.stop: .* at most 64 .*, not 100000"),
        ([1], SamplingParams(1, stop=("x" * 2**20,)), r"sampling.stop\[0\]: .* at most 256 characters"),
        *(([1], SamplingParams(1, stop=stop), "sampling.stop") for stop in (("",), ("\ud83d",), (3,), "</a>", None)),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            asyncio.run(engine.generate(ids, sampling))
        assert len(str(raised.value)) < 300 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("exit", "exit code 3"),
        (signal.SIGKILL, "SIGKILL"),
    ],
)
def test_a_dead_child_fails_every_request(cause, message):
    async def main():
        first = {"exception": 13, "exit": 14}.get(cause, 1)
        engine = echo(seconds=600.0 if first == 1 else 0.0)  # one that is killed is in the middle of the first request
        await engine.start()
        requests = [asyncio.ensure_future(engine.generate([i], ONE)) for i in (first, 2, 3)]
        await asyncio.sleep(0.01)
        if first == 1:
            os.kill(engine.pid, cause)
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, InfrastructureError)
            assert re.search(message, str(outcome))
        with pytest.raises(InfrastructureError, match=message):
            await engine.generate([1], ONE)
        with pytest.raises(InfrastructureError, match=message):
            await push_weights(engine, [("weight", torch.ones(2, 2))], version=1)
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 600))


def test_a_load_that_fails_half_way_ends_the_child():
    """ValueError says that nothing has changed, which only the check before the load can."""

    async def main():
        engine = echo(fails_to_load=True)
        await engine.start()
        with pytest.raises(InfrastructureError, match="it failed half-way"):
            await push_weights(engine, [("weight", torch.ones(2, 2))], version=1)
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 600))


def test_options_that_do_not_fit_are_a_value_error():
    with pytest.raises(ValueError, match="two is not enough"):
        asyncio.run(echo(refuse="two is not enough").start())


@pytest.mark.slow
def test_the_child_dies_with_a_killed_parent():
    script = (
        "import asyncio\n"
        "from rollout.engines.base import SamplingParams\n"
        "from tests.rollout.engines.test_engine_process import echo\n"
        "async def main():\n"
        "    engine = echo(seconds=60)\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    await engine.generate([1], SamplingParams(1))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.2)  # the child is in the middle of its 60 seconds
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(child)


def test_weight_files_come_in_shards_and_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr("rollout.engines.weights.files.SHARD_BYTES", 300)
    shared = torch.arange(40.0)
    buffer = torch.zeros(8)

    def tensors():
        yield "a", shared
        yield "b", shared.view(8, 5).t()  # neither contiguous nor its own storage
        for name in ("c", "d"):  # a gather that reuses its buffer
            buffer.fill_(ord(name))
            yield name, buffer

    files = WeightFiles.write(tensors())
    loaded = dict(files.tensors())
    assert len(files.paths) == 2
    assert torch.equal(loaded["a"], shared) and torch.equal(loaded["b"], shared.view(8, 5).t())
    assert (loaded["c"] == ord("c")).all() and (loaded["d"] == ord("d")).all()
    files.remove()
    assert not any(Path(path).exists() for path in files.paths)
    with pytest.raises(ValueError, match="'a' was given twice"):
        WeightFiles.write([("a", shared), ("a", shared)])


def test_shared_memory_that_others_fill_meanwhile(tmp_path, monkeypatch):
    """Ranks of one host look at the same free space; the file then goes to the disk."""
    import safetensors.torch

    save = safetensors.torch.save_file

    def out_of_space(tensors, path, metadata):
        if Path(path).parent == tmp_path:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, metadata)

    monkeypatch.setattr("rollout.engines.weights.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(safetensors.torch, "save_file", out_of_space)
    files = WeightFiles.write([("a", torch.ones(3))])
    assert torch.equal(dict(files.tensors())["a"], torch.ones(3)) and not list(tmp_path.iterdir())
    files.remove()


def test_files_of_a_killed_writer_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.engines.weights.files.SHARED_MEMORY", tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, ours = (tmp_path / f"{PREFIX}{pid}-x.safetensors" for pid in (dead.pid, os.getpid()))
    left.touch()
    ours.touch()
    files = WeightFiles.write([("a", torch.zeros(2))])
    assert Path(files.paths[0]).parent == tmp_path
    assert ours.exists() and not left.exists()


def test_files_of_other_containers_and_users_stay(tmp_path, monkeypatch):
    """Containers share /dev/shm with --ipc=host, but not the numbers of their processes."""
    theirs, old = (tmp_path / f"{PREFIX}999999999-1-{name}.safetensors" for name in ("new", "old"))
    theirs.touch()
    old.touch()
    os.utime(old, (0, 0))
    remove_leftovers(tmp_path)
    assert theirs.exists() and not old.exists()
    shorter = tmp_path / f"{PREFIX}999999999"  # a name without a namespace
    shorter.touch()
    remove_leftovers(tmp_path)
    assert not shorter.exists()
    (tmp_path / f"{PREFIX}999999999-x").touch()

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    remove_leftovers(tmp_path)
