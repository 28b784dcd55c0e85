"""Started by test_weight_sync.py: two ranks under ZeRO-3 that share two vLLM servers, then with an engine each.

``python server_ranks_worker.py OUT MODEL URL URL``; asserts on both ranks.
"""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import lightning as L
import torch

from callbacks.training.weight_sync import WeightSync, generation_gap
from common.restarts import Restarts
from lightning_modules.sharding.strategies import ZeRO3
from rollout.engines.base import EngineGone, SamplingParams
from rollout.engines.vllm_engine import VLLMEngine
from rollout.engines.vllm_servers.engine import VLLMServers
from rollout.engines.weights.files import PREFIX, SHARED_MEMORY, WeightFiles
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import InfrastructureError
from tests.callbacks.helpers import make_learner
from tests.rollout.engines.conftest import random_prompts
from tests.rollout.engines.plain_backend import PlainEngine
from tests.rollout.scripted import ToyRetriever

torch.set_num_threads(1)
OUT, MODEL, URLS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]


class Rank(L.Callback):
    """Both ranks sample from the version that was just pushed; only the first one has sent it."""

    tags: list[str] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rollouts = trainer.datamodule.rollouts
        _, said = rollouts.probe("Where?", 4)
        assert [g.policy_version for g in said.values()] == [trainer.global_step] * len(URLS)
        self.tags.append(rollouts.engine.held.label)
        if trainer.global_step == 2:
            self.goes_on_across_a_push(rollouts, module)

    def goes_on_across_a_push(self, rollouts, module):
        """Whoever sends, each rank's own requests go on, and no rank takes the server for one gone astray."""
        engine, rollouts.in_flight_updates = rollouts.engine, True
        for version in (3, 4):
            lasts = rollouts.background(engine.generate([5, 6, 7], SamplingParams(200, seed=version)))
            rollouts.load_weights(module.policy_weights(), version)
            assert lasts.result().policy_version in (version - 1, version)
            again = rollouts.background(engine.generate([5, 6, 7], SamplingParams(4))).result()
            assert again.policy_version == version and not again.version_runs
            assert not engine.pool._searches, "the server was taken for lost"
        rollouts.in_flight_updates = False


def tokens_of_both_ranks_are_those_of_one_process(module, rollouts) -> None:
    """Each rank asks the servers for half of the requests, and an engine of its own for all."""
    rank, prompts = torch.distributed.get_rank(), random_prompts(12, seed=3)

    async def ask(engine, numbers):
        done = await asyncio.gather(*(engine.generate(prompts[i], SamplingParams(40, seed=i)) for i in numbers))
        return [(i, g.token_ids, g.logprobs) for i, g in zip(numbers, done, strict=True)]

    both = [None, None]
    half = rollouts.background(ask(rollouts.engine, range(rank, len(prompts), 2))).result()
    torch.distributed.all_gather_object(both, half)
    own = system(VLLMEngine(MODEL, 256))
    own.load_weights(module.policy_weights(), 4)
    assert sorted(both[0] + both[1]) == own.background(ask(own.engine, range(len(prompts)))).result()
    own.close()


def system(engine):
    protocol = SearchR1Protocol(MODEL, template="short")
    return RolloutSystem(engine, protocol, QuestionAnswering({"search": SearchTool(ToyRetriever())}))


def raised(kind, message, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"nothing was heard of {message!r}")


def breaks_off():
    yield "a", torch.zeros(1)
    raise RuntimeError("the gathering broke off")


def engines_of_their_own(module) -> None:
    """One file for both ranks' engines; what fails on one rank is heard of by both."""
    rank, rollouts = torch.distributed.get_rank(), system(PlainEngine(MODEL))
    written, write = [], WeightFiles.write
    WeightFiles.write = lambda tensors, checksum: written.append(write(tensors, checksum)) or written[-1]
    for version, in_flight_updates in ((1, False), (2, True)):
        rollouts.in_flight_updates = in_flight_updates
        rollouts.load_weights(module.policy_weights(), version, checksum=True)
        ids, said = rollouts.probe("Where?", 4)
        assert [g.policy_version for g in said.values()] == [version]
        assert generation_gap(module.policy, ids, said["the engine"]) < 1e-3
    assert len(written) == (2 if rank == 0 else 0)
    there = [Path(path).exists() for files in written for path in files.paths]
    assert there == ([False, True] if rank == 0 else []), "the latest is kept for engines that are started anew"
    raised(ValueError, "rank 0: the weights do not fit", rollouts.load_weights, [("nonsense", torch.zeros(1))], 9)

    def full(tensors, checksum):
        next(tensors)
        del tensors  # whatever closes what it was given: the others still gather
        raise OSError("no room")

    WeightFiles.write, gathered = full, []
    weights = (gathered.append(name) or (name, weight) for name, weight in module.policy_weights())
    raised(
        InfrastructureError, "rank 0: weights could not be pushed: OSError: no room", rollouts.load_weights, weights, 9
    )
    assert gathered == [name for name, _ in module.policy_weights()], "not gathered to the end"
    WeightFiles.write = write
    raised(RuntimeError, "the gathering broke off", rollouts.load_weights, breaks_off(), 9)
    if rank == 1:  # it is started anew, with what the other rank has kept
        os.kill(rollouts.engine.pid, signal.SIGKILL)
    ids, said = rollouts.probe("Where?", 4)
    assert said["the engine"].policy_version == 2
    assert generation_gap(module.policy, ids, said["the engine"]) < 1e-3
    if rank == 1:
        rollouts.engine._children.restarts = Restarts(0)
        os.kill(rollouts.engine.pid, signal.SIGKILL)
    raised(EngineGone, "rank 1: the engine died: ", rollouts.load_weights, module.policy_weights(), 9)
    rollouts.close()
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    assert not [path for place in places for path in place.glob(f"{PREFIX}{os.getpid()}-*")]


def main() -> None:
    rollouts = system(VLLMServers(URLS, MODEL, 256))
    module, data = make_learner(Path(MODEL), rollouts=rollouts)
    sync, rank = WeightSync(probe=True, probe_tolerance=1e-3, checksum=True), Rank()
    trainer = L.Trainer(
        default_root_dir=OUT, accelerator="cpu", devices=2, strategy=ZeRO3(), max_steps=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[sync, rank],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, (rank.tags, sync.gap))
    assert everyone[0] == everyone[1], everyone
    assert len(set(rank.tags)) == 2
    tokens_of_both_ranks_are_those_of_one_process(module, rollouts)
    # What the servers refuse, both ranks hear of.
    raised(ValueError, "nonsense", rollouts.load_weights, [("nonsense", torch.zeros(1))], 9)
    # After a push that breaks off on all ranks, no rank's requests wait for its end.
    raised(RuntimeError, "the gathering broke off", rollouts.load_weights, breaks_off(), 9)
    rollouts.background(rollouts.engine.generate([5, 6, 7], SamplingParams(4))).result(120)
    rollouts.close()
    engines_of_their_own(module)
    print("rank is through", flush=True)


main()
