"""With the real engine in its child process: the sampler has exactly the weights that were trained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from callbacks.training.weight_sync import WeightSync, generation_gap
from common.secret import SECRET_VARIABLE
from lightning_modules.models.policy import load_causal_lm
from rollout.engines.base import Generation, SamplingParams
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.weights.files import WeightFiles
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import Task
from tests.callbacks.helpers import make_learner
from tests.rollout.engines.plain_backend import PlainEngine
from tests.rollout.engines.vllm_processes import SECRET, Running, running
from tests.rollout.scripted import ToyRetriever

PROBE_TASK = Task("probe", "Where is the old lighthouse?", ("nowhere",), "probe")
WORKER = Path(__file__).with_name("server_ranks_worker.py")


class Recorded(RolloutSystem):
    """The real system; also notes which versions were pushed."""

    forgets = False  # whether what is pushed is thrown away

    def load_weights(self, tensors, version, checksum=False):
        if not self.forgets:
            super().load_weights(tensors, version, checksum)
        self.__dict__.setdefault("versions", []).append(version)


@pytest.fixture(scope="module")
def rollouts(model_dir):
    system = Recorded(
        PlainEngine(str(model_dir)),
        SearchR1Protocol(str(model_dir), template="short"),
        QuestionAnswering({"search": SearchTool(ToyRetriever())}),
        reward=None,
    )
    system.start()
    yield system
    system.close()


@pytest.fixture(autouse=True)
def fresh_record(rollouts):
    rollouts.versions, rollouts.forgets = [], False


def sample(rollouts):
    (trajectory,) = rollouts.rollout(
        [PROBE_TASK], sampling=SamplingParams(8, temperature=0.0), seed=0, mode=PromptMode.CLOSED_BOOK
    )
    return trajectory


def gap(policy, trajectory):
    """Of the first turn: what it samples stands at the beginning of the response."""
    sampled = trajectory.loss_mask.index(0) if 0 in trajectory.loss_mask else len(trajectory.loss_mask)
    assert sampled > 0
    first = Generation(trajectory.response_ids[:sampled], trajectory.logprobs[:sampled], "eos", 0)
    return generation_gap(policy, list(trajectory.prompt_ids), first)


def test_every_iteration_pushes_once_and_the_engine_follows_the_trainer(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    sync = WeightSync(probe=True, probe_tolerance=1e-3, checksum=True)
    trainer = trainer_for([sync], max_epochs=1, val_check_interval=2)
    trainer.fit(module, datamodule=data)
    assert rollouts.versions == [0, 1, 2, 3, 4]  # at the start and after each step; validations find it done
    assert rollouts.policy_version == 4 and sync.seconds > 0
    assert float(trainer.callback_metrics["weight_sync/probe_gap"]) < 1e-4
    assert gap(module.policy, sample(rollouts)) < 1e-4
    assert sample(rollouts).turns[0].policy_version == 4


def test_a_stale_engine_shows_in_the_gap(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    trainer_for([WeightSync()], max_epochs=1, max_steps=1).fit(module, datamodule=data)
    before = sample(rollouts)
    trainer_for([], max_epochs=1).fit(module, datamodule=data)  # trains on without a push
    assert gap(module.policy, before) > 1e-2


def test_the_gap_of_a_packed_model_is_that_of_a_padded_one(model_dir):
    said = Generation((5, 6, 7), (-1.0, -2.0, -3.0), "length", 0)
    models = [load_causal_lm(str(model_dir), attention=name) for name in ("sdpa", "packed")]
    padded, packed = (generation_gap(model, [1, 2, 3, 4], said) for model in models)
    assert packed == pytest.approx(padded, abs=1e-5) and padded > 1


def test_supervised_stages_push_for_evaluation_only(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    trainer = trainer_for([WeightSync(during_training=False)], max_epochs=1, val_check_interval=2)
    trainer.fit(module, datamodule=data)
    assert rollouts.versions == [2, 4]
    trainer.test(module, datamodule=data, verbose=False)
    assert rollouts.versions == [2, 4, 4]  # a checkpoint might have been restored in between


def test_a_data_module_without_rollouts_is_refused(trainer_for, model_dir):
    module, data = make_learner(model_dir)
    with pytest.raises(ValueError, match="WeightSync needs a data module with a rollout system, found Data"):
        trainer_for([WeightSync()], max_epochs=1).fit(module, datamodule=data)


def test_a_stale_engine_is_an_error_above_the_tolerance(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, rollouts=rollouts)
    trainer_for([WeightSync()], max_epochs=1, max_steps=1).fit(module, datamodule=data)
    rollouts.forgets = True
    sync = WeightSync(probe=True, probe_tolerance=1e-3)
    with pytest.raises(ValueError, match=r"version 1: 1 of 1 engines differ .* 0.001 nats .the engine: "):
        trainer_for([sync], max_epochs=1).fit(module, datamodule=data)


@pytest.mark.slow
def test_weights_that_change_on_their_way_are_refused(trainer_for, model_dir, rollouts, monkeypatch):
    write = WeightFiles._write_shard

    def damage(files, bucket):
        write(files, bucket)
        with open(files.paths[-1], "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))

    monkeypatch.setattr(WeightFiles, "_write_shard", damage)
    module, data = make_learner(model_dir, rollouts=rollouts)
    with pytest.raises(ValueError, match=r"changed in transfer: model\.\S+ has the checksum float32\[.*keeps its"):
        trainer_for([WeightSync(checksum=True)], max_epochs=1).fit(module, datamodule=data)


@contextlib.contextmanager
def forgetful(url):
    """The address of a server that says it has taken the weights, and has not: what the probe is there to catch."""

    async def forward(request):
        if request.path == "/update_weights":
            return web.json_response({"message": "Weights updated"})
        target = f"{url}{request.path_qs}"
        async with ClientSession() as session:
            async with session.request(
                request.method, target, data=await request.read(), headers=request.headers
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def begin():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = asyncio.new_event_loop()
    runner = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow
def test_servers_are_probed_one_by_one_and_shared_by_two_ranks(trainer_for, model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with running(Running(model_dir), Running(model_dir)) as (sound, other), forgetful(other.url) as stale:
        system = RolloutSystem(
            VLLMServers([sound.url, stale], str(model_dir), 256),
            SearchR1Protocol(str(model_dir), template="short"),
            QuestionAnswering({"search": SearchTool(ToyRetriever())}),
        )
        module, data = make_learner(model_dir, rollouts=system)
        sync = WeightSync(probe=True, probe_tolerance=1e-3, checksum=True)
        with pytest.raises(ValueError, match=rf"version 1: 1 of 2 engines differ .*\({stale}: [^;]*\)"):
            trainer_for([sync], max_epochs=1).fit(module, datamodule=data)
        system.close()
        command = [sys.executable, str(WORKER), str(tmp_path), str(model_dir), sound.url, other.url]
        ranks = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = ranks.communicate(timeout=900)
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGKILL)
        assert ranks.returncode == 0, said[-5000:]
        assert "rank is through" in said


def test_adapters_need_a_model_with_lora(trainer_for, model_dir):
    system = RolloutSystem(
        VLLMServers(["http://127.0.0.1:9"], str(model_dir), 256, adapters=True),
        SearchR1Protocol(str(model_dir), template="short"),
        QuestionAnswering({"search": SearchTool(ToyRetriever())}),
    )
    module, data = make_learner(model_dir, rollouts=system)
    with pytest.raises(ValueError, match="adapters: true, and .* trains all weights; expected model.lora"):
        trainer_for([WeightSync()], max_epochs=1).fit(module, datamodule=data)
