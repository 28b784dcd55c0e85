"""With the real engine in its child process: the sampler has exactly the weights that were trained."""

from __future__ import annotations

import pytest

from callbacks.weight_sync import PROBE_TASK, WeightSync, logprob_gap
from rollout.engines.base import SamplingParams
from rollout.engines.transformers_engine import TransformersEngine
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.base import PromptMode
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from tests.callbacks.helpers import make_learner
from tests.rollout.scripted import ToyRetriever


class Recorded(RolloutSystem):
    """The real system; also notes which versions were pushed."""

    def load_weights(self, tensors, version):
        super().load_weights(tensors, version)
        self.__dict__.setdefault("versions", []).append(version)


@pytest.fixture(scope="module")
def rollouts(model_dir):
    system = Recorded(
        TransformersEngine(str(model_dir), slots=4, max_length=256),
        SearchR1Protocol(str(model_dir), template="short"),
        QuestionAnswering({"search": SearchTool(ToyRetriever())}),
        reward=None,
    )
    system.start()
    yield system
    system.close()


@pytest.fixture(autouse=True)
def fresh_record(rollouts):
    rollouts.versions = []


def sample(rollouts):
    (trajectory,) = rollouts.rollout(
        [PROBE_TASK], sampling=SamplingParams(8, temperature=0.0), seed=0, mode=PromptMode.CLOSED_BOOK
    )
    return trajectory


def test_every_iteration_pushes_once_and_the_engine_follows_the_trainer(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    sync = WeightSync(probe=True)
    trainer = trainer_for([sync], max_epochs=1, val_check_interval=2)
    trainer.fit(module, datamodule=data)
    assert rollouts.versions == [0, 1, 2, 3, 4]  # at the start and after each step; validations find it done
    assert rollouts.policy_version == 4 and sync.seconds > 0
    assert float(trainer.callback_metrics["weight_sync/probe_gap"]) < 1e-4
    assert logprob_gap(module.policy, sample(rollouts)) < 1e-4
    assert sample(rollouts).turns[0].policy_version == 4


def test_a_stale_engine_shows_in_the_gap(trainer_for, model_dir, rollouts):
    module, data = make_learner(model_dir, ["grey harbor"] * 2, rollouts=rollouts)
    trainer_for([WeightSync()], max_epochs=1, max_steps=1).fit(module, datamodule=data)
    before = sample(rollouts)
    trainer_for([], max_epochs=1).fit(module, datamodule=data)  # trains on without a push
    assert logprob_gap(module.policy, before) > 1e-2


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
