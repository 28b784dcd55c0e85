"""Batches of saved and of the student's own trajectories, and the schedules that mix them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.training.resume import IterationCheckpoint, find_checkpoint
from callbacks.training.throughput import Throughput
from callbacks.training.training_totals import TrainingTotals
from callbacks.training.weight_sync import WeightSync
from data_modules.datasets.files import DatasetError
from data_modules.loading.decoding import Decoding
from data_modules.loading.mixing import AdaptiveOffPolicy, OnPolicyShare
from data_modules.mixed_data_module import MixedDataModule
from data_modules.supervised_data_module import SupervisedDataModule
from lightning_modules.algorithms.cold_start_kd import ColdStartKD
from lightning_modules.algorithms.sft import SFT
from rollout.engines.base import SamplingParams
from rollout.storage import save_trajectories
from tests.data_modules.toys import Recorder, make_task, trainer


@pytest.fixture
def saved(make_system, tmp_path):
    """40 right answers of a teacher; asked again, the student answers by the seed."""
    found = make_system().rollout([make_task(i) for i in range(40)], sampling=SamplingParams(100), seed=0)
    asked = [t.replace(task=make_task(i, "mixed")) for i, t in enumerate(found)]
    save_trajectories(tmp_path / "saved" / "a.parquet", asked)
    return str(tmp_path / "saved")


@pytest.fixture
def make_data(saved, make_system, question_file):
    def make(mixing, **options) -> MixedDataModule:
        options = {"batch_size": 8, "seed": 1, "val_files": [question_file("val", ["right"] * 4)], **options}
        return MixedDataModule([saved], make_system(), mixing, **options)

    return make


def names(batches):
    return [[t.group for t in batch] for batch in batches]


def fit(data, tmp_path, epochs=2, **options):
    module = Recorder(push=data.rollouts is not None)
    trainer(tmp_path, max_epochs=epochs, limit_val_batches=0, **options).fit(module, datamodule=data)
    return module.train_batches


# --- schedules ------------------------------------------------------------------------------------------------------


def test_adaptive_off_policy_against_a_plain_form_over_400_steps():
    """Losses that fall, rise in jumps and fall again; phi, the reference and every source by a form of its own."""
    mixing, total, capacity = AdaptiveOffPolicy(capacity=60), 400, 60
    rng, kept, phis, seen = random.Random(3), 0, [], set()
    losses = [2.0 - 0.3 * min(i, 3) + 0.15 * max(0, i - 5) for i in range(20)]
    share, reference = 0, losses[0]  # share in tenths, so that nothing is rounded
    mixing.validated(losses[0])
    for step in range(1, total + 1):
        draw = rng.random()
        student, anew = draw * 10 < share, draw * 10 * total < share * (total - step)
        expected = "fixed" if not student else "fresh" if anew or kept < capacity else "kept"
        assert mixing.source(draw, step, total, kept) == expected
        seen.add(expected)
        kept += 4 * (expected == "fresh")
        if step % 20 == 0:
            loss = losses[step // 20 - 1]
            mixing.validated(loss)
            if loss - reference >= 0.1:
                share, reference = min(10, share + 1), loss
            assert mixing.phi == pytest.approx(share / 10) and mixing.reference == reference
            phis.append(share)
    assert seen == {"fixed", "fresh", "kept"} and phis[8] == 0 and phis[-1] >= 5


# --- batches --------------------------------------------------------------------------------------------------------


def test_fresh_batches_ask_what_the_saved_ones_answer(make_data, saved, protocol, tmp_path):
    plain = fit(
        SupervisedDataModule([saved], batch_size=8, tokenizer=protocol.tokenizer.name_or_path, seed=1), tmp_path
    )
    fixed = fit(make_data(OnPolicyShare(0.0)), tmp_path)
    assert fixed == plain
    data = make_data(OnPolicyShare(1.0))
    fresh = fit(data, tmp_path)
    assert [sorted(batch) for batch in names(fresh)] == [sorted(batch) for batch in names(plain)]
    versions = [{t.turns[0].policy_version for t in batch} for batch in fresh]
    assert versions == [{step} for step in range(10)], "each with the weights of the step before"
    assert 0.2 < sum(t.reward.total for batch in fresh for t in batch) / 80 < 0.8, "sampled anew: right by the seed"
    assert all(t.response_ids[-1] == protocol.stop_token_ids[0] for batch in fresh for t in batch if t.answer)
    assert data.batch_metrics["data/fresh"] == 1.0 and 0 <= data.batch_metrics["data/fresh_reward"] <= 1


def test_kept_trajectories_were_fresh_once_and_a_resumed_run_goes_on(make_data, tmp_path):
    def make():
        return make_data(AdaptiveOffPolicy(capacity=20, start=0.7), held_out=8)

    data = make()
    sources, source = [], data._source
    data._rows, rows = (lambda position: (sources.append(source(position)), rows(position))[1]), data._rows
    whole = fit(data, tmp_path, epochs=4)
    assert len(whole) == 16 and set(sources) == {"fixed", "fresh", "kept"}
    sampled: list = []
    for name, batch in zip(sources, whole, strict=True):
        if name == "fresh":
            sampled = [*sampled, *batch][-20:]
        elif name == "kept":
            assert len(batch) == 8 and len({id(t) for t in batch}) == 8 and all(t in sampled for t in batch)
    checkpoint = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1, enable_version_counter=False)
    cut, rest = Recorder(stop_after=9), Recorder()
    options = {"max_epochs": 4, "limit_val_batches": 0}
    with pytest.raises(RuntimeError, match="switched off"):
        trainer(tmp_path, enable_checkpointing=True, callbacks=[checkpoint], **options).fit(cut, datamodule=make())
    trainer(tmp_path, **options).fit(rest, datamodule=make(), ckpt_path=tmp_path / "c" / "last.ckpt")

    def content(batches):  # versions restart with the engine
        return [[(t.group, t.response_ids) for t in batch] for batch in batches]

    assert content(cut.train_batches[:8] + rest.train_batches) == content(whole)


def test_ranks_share_fresh_and_kept_batches(make_data, monkeypatch):
    """Two ranks, whose gathering is played: together they hold what one would."""
    import data_modules.mixed_data_module as module

    def make(rank, world):
        data = make_data(AdaptiveOffPolicy(capacity=8, start=1.0), held_out=8)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world, estimated_stepping_batches=4)
        data.setup("fit")
        return data

    alone = make(0, 1)
    expected = [alone._rows(position) for position in range(4)]
    ranks = [make(rank, 2) for rank in range(2)]
    for position in range(4):
        parts: list = []
        monkeypatch.setattr(module, "gather_lists", lambda own: own)
        for data in ranks:
            kept = list(data._kept)
            saved = SupervisedDataModule._rows(data, position)
            parts.append(data._sample(position, saved) if data._source(position) == "fresh" else [])
            assert list(data._kept) == kept
        monkeypatch.setattr(module, "gather_lists", lambda own, parts=parts: sum(parts, []))
        batches = [data._batch(position) for data in ranks]
        assert sorted(sum(names(batches), [])) == sorted(t.group for t in expected[position])
        assert {t.response_ids for batch in batches for t in batch} == {t.response_ids for t in expected[position]}


def test_attempts_at_one_question_differ_on_any_number_of_ranks(make_data, monkeypatch):
    import data_modules.mixed_data_module as module

    monkeypatch.setattr(module, "gather_lists", lambda own: own)

    def sampled(rank, world):
        data = make_data(AdaptiveOffPolicy(capacity=8, start=1.0), held_out=8)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world, estimated_stepping_batches=4)
        data.setup("fit")
        saved = SupervisedDataModule._rows(data, 0)[:3]
        return data._sample(0, [t.replace(index=attempt) for t in saved for attempt in range(2)])

    alone = {(t.task.id, t.response_ids) for t in sampled(0, 1)}
    assert {(t.task.id, t.response_ids) for rank in range(2) for t in sampled(rank, 2)} == alone


@pytest.mark.parametrize("rows", [1, 2])  # of a trajectory, which have a prompt each
def test_weights_are_pushed_and_costs_counted_for_what_is_sampled_alone(
    make_data, model_dir, teacher_dir, tmp_path, monkeypatch, rows
):
    monkeypatch.setattr("data_modules.mixed_data_module.split_turns", lambda trajectory: [trajectory] * rows)
    data = make_data(OnPolicyShare(0.5))
    pushed, load = [], data.rollouts.load_weights
    data.rollouts.load_weights = lambda weights, version, **kw: (pushed.append(version), load(weights, version, **kw))[
        1
    ]
    module = ColdStartKD(str(model_dir), str(teacher_dir), ce_coef=0.0, divergence="jsd", lr=1e-3)
    seen: list[dict] = []
    module.log_dict = lambda metrics, **_: seen.append(metrics)
    callbacks = [WeightSync(), Throughput(), TrainingTotals()]
    trainer(tmp_path, max_epochs=2, limit_val_batches=0, callbacks=callbacks).fit(module, datamodule=data)
    fresh = [metrics["data/fresh"] for metrics in seen if "data/fresh" in metrics]
    assert 2 <= sum(fresh) <= 8 and pushed == [step for step, is_fresh in enumerate(fresh) if is_fresh]
    assert ["time/rollout" in metrics for metrics in seen if "time/train" in metrics] == fresh
    assert callbacks[2].totals()["trajectories"] == 8 * sum(fresh)


def test_held_out_losses_are_those_of_the_model_and_reach_the_schedule(make_data, model_dir, teacher_dir, tmp_path):
    mixing = AdaptiveOffPolicy(tolerance=0.0)
    told: list[float] = []
    mixing.validated, validated = (lambda loss: (told.append(loss), validated(loss))), mixing.validated
    data = make_data(mixing, held_out=5)
    module = ColdStartKD(str(model_dir), str(teacher_dir), ce_coef=0.0, lr=0.0)
    seen: list[dict] = []
    module.log_dict = lambda metrics, **_: seen.append(metrics)
    trainer(tmp_path, max_epochs=2, callbacks=[WeightSync()]).fit(module, datamodule=data)
    assert len(told) == 3 and mixing.phi == pytest.approx(0.2), "before training and after each epoch; equal is no fall"
    trained = [t.group for batch in (SupervisedDataModule._rows(data, i) for i in range(5)) for t in batch]
    assert len(data._held_out) == 5 and not {t.group for t in data._held_out} & set(trained) and len(trained) == 35
    with torch.no_grad():
        total, count = 0.0, 0
        for t in data._held_out:
            ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
            log_p = module.policy(input_ids=ids).logits[0].log_softmax(-1)
            at = [len(t.prompt_ids) + i for i, on in enumerate(t.loss_mask) if on]
            total -= sum(float(log_p[i - 1, ids[0, i]]) for i in at)
            count += len(at)
    assert told[0] == pytest.approx(total / count, rel=1e-4)
    assert [m["val/ce"] for m in seen if "val/ce" in m] == pytest.approx(told[1:])


def test_a_resumed_run_takes_nothing_for_a_validation(make_data, model_dir, teacher_dir, tmp_path):
    """A validation that a resume adds would raise phi here, where every loss counts as a rise."""

    def fit_on(epochs, checkpoint=None):
        data = make_data(AdaptiveOffPolicy(tolerance=0.0), held_out=5)
        module = ColdStartKD(str(model_dir), str(teacher_dir), ce_coef=0.0, lr=0.0)
        kept = ModelCheckpoint(
            tmp_path / "c", filename="last", enable_version_counter=False, save_on_train_epoch_end=True
        )
        options = {"enable_checkpointing": True, "callbacks": [WeightSync(), kept]}
        trainer(tmp_path, max_epochs=epochs, **options).fit(module, datamodule=data, ckpt_path=checkpoint)
        return data.mixing.phi

    assert fit_on(1) == pytest.approx(0.1)
    assert fit_on(2, tmp_path / "c" / "last.ckpt") == pytest.approx(0.2)


def test_what_cannot_be_learnt_is_refused(make_data, model_dir, teacher_dir, tmp_path):
    for module in (SFT(str(model_dir)), ColdStartKD(str(model_dir), str(teacher_dir))):
        with pytest.raises(ValueError, match="would only repeat them"):
            trainer(tmp_path, max_epochs=1).fit(module, datamodule=make_data(OnPolicyShare()))
    with pytest.raises(ValueError, match="found held_out 0 and 1 val_files; give both"):
        make_data(AdaptiveOffPolicy())
    shortest = make_data(AdaptiveOffPolicy(), held_out=5)
    shortest._short = lambda rows: [row for row in rows if row.group not in kept_out]
    kept_out = {f"q{i}" for i in range(40)} - {"q1"}
    with pytest.raises(DatasetError, match="no trajectory left to validate on"):
        trainer(tmp_path, max_epochs=1).fit(Recorder(), datamodule=shortest)


def test_a_checkpoint_of_another_mixing_is_refused(make_data, saved, protocol, tmp_path):
    plain = SupervisedDataModule([saved], batch_size=8, tokenizer=protocol.tokenizer.name_or_path, seed=1)
    others = [make_data(OnPolicyShare(0.25)), make_data(OnPolicyShare(), train_sampling=Decoding(temperature=0.9))]
    for i, (written, error) in enumerate(
        [(plain, "of a MixedDataModule"), *((o, "mixing or the guide.s share differ") for o in others)]
    ):
        folder = tmp_path / str(i)
        options = {
            "callbacks": [IterationCheckpoint()],
            "enable_checkpointing": True,
            "max_epochs": 1,
            "limit_val_batches": 0,
        }
        trainer(folder, **options).fit(Recorder(push=written is not plain), datamodule=written)
        with pytest.raises(ValueError, match=error):
            resumed = trainer(folder, **options)
            resumed.fit(Recorder(), datamodule=make_data(OnPolicyShare()), ckpt_path=find_checkpoint(folder))
