"""Batches generated while others train: which weights sampled them, what fails where, and what a resume does."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from data_modules.loading.rollouts_ahead import StalenessError, check_staleness
from data_modules.rollout_data_module import RolloutDataModule
from rollout.trajectory import StopReason
from tests.callbacks.helpers import make_trajectory
from tests.data_modules.toys import Recorder, sampled_by, trainer


@pytest.fixture
def make_data(make_system, question_file):
    def make(kinds=("right",) * 12, latency=0.0, system=None, **options) -> RolloutDataModule:
        options = {"prompts_per_iteration": 3, "group_size": 2, "seed": 1, **options}
        return RolloutDataModule(system or make_system(latency), [question_file("train", list(kinds))], **options)

    return make


def keys(batches):
    return [[(t.group, t.index, t.response_ids) for t in batch] for batch in batches]


class Slow(Recorder):
    """Trains until whatever is generated meanwhile is done."""

    def training_step(self, batch, batch_idx):
        self.begun = getattr(self, "begun", [])
        self.trainer.datamodule._ahead.settle()
        self.begun.append(len(self.trainer.datamodule.rollouts.engine.requests))
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_every_token_is_at_most_k_iterations_old_and_the_questions_are_the_same(make_data, tmp_path, k):
    plain = Recorder()
    trainer(tmp_path, max_epochs=2).fit(plain, datamodule=make_data())
    module, data = Slow(), make_data(max_off_policy_iterations=k)
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    assert keys(module.train_batches) == keys(plain.train_batches)
    assert [sampled_by(batch) for batch in module.train_batches] == [{max(i - k, 0)} for i in range(8)]
    # Requests that were made by the end of training step i: of batches up to i + k, and of none beyond the last.
    assert module.begun == [6 * min(i + 1 + k, 8) for i in range(8)]
    assert data.generation_s > 0


def test_dynamic_sampling_offers_the_same_prompts(make_data, tmp_path):
    kinds = ["right", "wrong", "mixed", "right", "wrong", "right"] * 4
    options = {"prompts_per_iteration": 4, "group_size": 4, "dynamic_sampling": 3, "iterations": 3}
    runs = []
    for staleness in (0, 1):
        module, data = Recorder(), make_data(kinds, max_off_policy_iterations=staleness, **options)
        trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
        runs.append((keys(module.train_batches), data.discarded_groups, keys([data.discarded])))
    assert runs[0] == runs[1] and runs[0][1][0] > 0


def test_an_error_in_the_background_is_raised_at_its_batch(make_system, make_data, tmp_path):
    system, asked = make_system(), []
    script = system.engine._script

    def failing(ids, sampling):
        asked.append(ids)
        if len(asked) == 8:  # of the second batch, which is made while the first one trains
            raise ZeroDivisionError("the eighth request")
        return script(ids, sampling)

    system.engine._script = failing
    module = Slow()
    with pytest.raises(ZeroDivisionError, match="the eighth request"):
        trainer(tmp_path, max_epochs=1).fit(module, datamodule=make_data(system=system, max_off_policy_iterations=1))
    assert len(module.train_batches) == 1, "the first batch was trained on"
    assert not system.running, "the system was closed"


class Interrupted(Recorder):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        while self.trainer.datamodule.rollouts.engine.peak_concurrency <= 6:  # what is generated ahead is in flight
            time.sleep(0.001)
        raise KeyboardInterrupt


def test_ctrl_c_cancels_what_is_under_way(make_data, tmp_path):
    module, data = Interrupted(), make_data(latency=0.0, max_off_policy_iterations=2)
    data.rollouts.engine._latency = lambda ids: 0.0 if len(data.rollouts.engine.requests) <= 6 else 36000.0
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert not data.rollouts.running


class EvaluationApart(Recorder):
    """Notes which requests were made when an evaluation begins and ends."""

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        engine = self.trainer.datamodule.rollouts.engine
        assert engine._in_flight == 0, "something is generated beside the evaluation"
        self.kinds = [kind for _, kind in (engine.asked(r.token_ids) for r in engine.requests[-2:])]


def test_an_evaluation_has_the_engine_to_itself(make_data, question_file, tmp_path):
    data = make_data(latency=0.03, max_off_policy_iterations=2, val_files=[question_file("val", ["wrong", "wrong"])])
    module = EvaluationApart()
    trainer(tmp_path, max_epochs=1, val_check_interval=1).fit(module, datamodule=data)
    assert len(module.val_batches) == 4 and module.kinds == ["wrong", "wrong"], "the evaluation's were the last"
    assert all(sampled_by(b) <= {max(i - 1, 0), i, max(i - 2, 0)} for i, b in enumerate(module.train_batches))


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resume_generates_anew_what_was_ahead(make_data, tmp_path, staleness):
    whole = Recorder()
    trainer(tmp_path, max_epochs=2).fit(whole, datamodule=make_data())
    cut = Slow(stop_after=3)
    checkpoint = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1, enable_version_counter=False)
    with pytest.raises(RuntimeError, match="switched off"):
        run = trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint])
        run.fit(cut, datamodule=make_data(max_off_policy_iterations=staleness))
    rest, data = Recorder(), make_data(max_off_policy_iterations=staleness)
    rest.on_train_start = lambda: data.rollouts.load_weights([("weight", rest.weight)], rest.trainer.global_step)
    trainer(tmp_path, max_epochs=2).fit(rest, datamodule=data, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert keys(cut.train_batches[:2]) + keys(rest.train_batches) == keys(whole.train_batches)
    versions = [sampled_by(batch) for batch in rest.train_batches]
    assert versions == [{max(2, i - staleness)} for i in range(2, 8)], "with the checkpoint's weights at first"


def test_too_old_tokens_stop_the_run():
    young, old = (make_trajectory(), make_trajectory())
    young = young.replace(turns=tuple(dataclasses.replace(turn, policy_version=5) for turn in young.turns))
    first, last = young.turns  # four tokens each; only two of all eight are old
    old = young.replace(turns=(dataclasses.replace(first, version_runs=((3, 2), (5, 2))), last))
    check_staleness([young, old], 5, 2)
    check_staleness([young, old.replace(stop_reason=StopReason.INFRASTRUCTURE, reward=None)], 5, 1)
    with pytest.raises(StalenessError, match="weights 3, but the engine has weights 5 and .* is 1: expected 4"):
        check_staleness([young, old], 5, 1)


def test_two_ranks_generate_their_own_shares_ahead(make_data):
    def batches(rank, world, staleness):
        # Exchanging groups needs two processes: test_balance.py.
        data = make_data(prompts_per_iteration=4, max_off_policy_iterations=staleness, balance_tokens=False)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        data.setup("fit")
        found = [batch for _, batch in zip(range(3), data.train_dataloader(), strict=False)]
        data.close()
        return found

    alone = keys(batches(0, 1, 0))
    first, second = (keys(batches(rank, 2, 1)) for rank in range(2))
    assert [left + right for left, right in zip(first, second, strict=True)] == alone
