import re

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from data_modules.datasets.files import DatasetError
from data_modules.supervised_data_module import SupervisedDataModule, append_eos, length_of
from rollout.engines.base import SamplingParams
from rollout.storage import save_trajectories
from rollout.trajectory import StopReason
from tests.data_modules.toys import Recorder, make_task, sampled_by, trainer


@pytest.fixture
def trajectories(make_system):
    """40 real ones: 20 right, 19 wrong, and a last one that infrastructure failed."""
    tasks = [make_task(i, "broken" if i == 39 else "wrong" if i % 2 else "right") for i in range(40)]
    return make_system().rollout(tasks, sampling=SamplingParams(100), seed=0)


@pytest.fixture
def saved(trajectories, tmp_path):
    folder = tmp_path / "trajectories"
    save_trajectories(folder / "b.parquet", trajectories[25:])
    save_trajectories(folder / "a.parquet", trajectories[:25])
    return str(folder)


@pytest.fixture
def make_data(saved, model_dir):
    def make(**options) -> SupervisedDataModule:
        return SupervisedDataModule([saved], **{"batch_size": 8, "tokenizer": str(model_dir), "seed": 1, **options})

    return make


def names(batches):
    return [[t.group for t in batch] for batch in batches]


def test_eos_becomes_part_of_the_answer_turn(trajectories, protocol):
    eos = protocol.stop_token_ids[0]
    before = trajectories[0]
    after = append_eos(before, eos)
    assert after.response_ids == (*before.response_ids, eos)
    assert after.loss_mask == (*before.loss_mask, 1)
    assert after.logprobs == (*before.logprobs, 0.0)
    assert (after.turns[-1].start, after.turns[-1].end) == (before.turns[-1].start, len(after.response_ids))
    assert after.turns[-1].observation_end == after.turns[-1].end
    assert after.replace(response_ids=before.response_ids, loss_mask=before.loss_mask, logprobs=before.logprobs,
                         turns=before.turns) == before  # fmt: skip
    assert append_eos(after, eos) is after, "never twice"
    cut = before.replace(stop_reason=StopReason.LENGTH)
    assert append_eos(cut, eos) is cut, "not after a trajectory without an answer"


def test_batches_hold_everything_usable_once_with_eos(make_data, protocol, tmp_path):
    data, module = make_data(), Recorder(push=False)
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    first, second = module.train_batches[:5], module.train_batches[5:]
    assert len(second) == 5
    for part in (first, second):
        assert sorted(sum(names(part), [])) == sorted(f"q{i}" for i in range(39))
        assert all(len(batch) <= 8 for batch in part)
    assert names(first) != names(second)
    eos = protocol.stop_token_ids[0]
    assert all(t.response_ids[-1] == eos and t.loss_mask[-1] == 1 for batch in first for t in batch)
    plain, module = make_data(append_eos=False, tokenizer=None), Recorder(push=False)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=plain)
    assert names(module.train_batches) == names(first)
    assert not any(t.response_ids[-1] == eos for batch in module.train_batches for t in batch)


@pytest.mark.parametrize("options", [{}])
@pytest.mark.parametrize("stop_after", [2, 6])
def test_resumed_run_takes_the_same_batches(make_data, tmp_path, options, stop_after):
    whole = Recorder(push=False)
    trainer(tmp_path, max_epochs=2).fit(whole, datamodule=make_data(**options))
    cut, rest = Recorder(push=False, stop_after=stop_after), Recorder(push=False)
    checkpoint = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1, enable_version_counter=False)
    with pytest.raises(RuntimeError, match="switched off"):
        trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]).fit(
            cut, datamodule=make_data(**options)
        )
    trainer(tmp_path, max_epochs=2).fit(rest, datamodule=make_data(**options), ckpt_path=tmp_path / "c" / "last.ckpt")
    assert names(cut.train_batches[: stop_after - 1] + rest.train_batches) == names(whole.train_batches)


def test_filters_are_reported(make_data, trajectories):
    data = make_data(max_train=20)
    data.setup("fit")
    assert data.report == {
        "found": 40, "unusable": 1, "beyond_max_train": 19, "too_long": 0, "kept": 20,
        "tokens": sum(length_of(t) for t in data._trajectories),
    }  # fmt: skip
    limit = sorted(length_of(t) + 1 for t in trajectories[:39])[10]  # + EOS
    data = make_data(max_tokens=limit)
    data.setup("fit")
    assert data.report["kept"] == sum(length_of(t) + 1 <= limit for t in trajectories[:39]) < 39
    assert data.report["too_long"] == 39 - data.report["kept"]
    with pytest.raises(DatasetError, match=re.escape("too_long 39, kept 0")):
        make_data(max_tokens=3).setup("fit")


def test_ranks_share_every_batch(make_data):
    from types import SimpleNamespace

    def batches(rank, world):
        data = make_data(batch_size=10)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        data.setup("fit")
        return list(data.train_dataloader())

    alone, parts = batches(0, 1), [batches(rank, 2) for rank in range(2)]
    for step, batch in enumerate(alone):
        assert sorted(sum(names([p[step] for p in parts]), [])) == sorted(t.group for t in batch)
        assert abs(len(parts[0][step]) - len(parts[1][step])) <= 1


def test_a_checkpoint_of_other_data_is_refused(make_data):
    data, other = make_data(), make_data(batch_size=9)
    data.setup("fit")
    other.setup("fit")
    with pytest.raises(ValueError, match="written over other training data"):
        other.load_state_dict(data.state_dict())


def test_evaluates_by_rollouts_whose_protocol_gives_the_eos(make_data, make_system, question_file, protocol, tmp_path):
    data = make_data(
        tokenizer=None, rollouts=make_system(), val_files=[question_file("val", ["right"] * 3)],
        test_files=[question_file("test", ["wrong"] * 2)],
    )  # fmt: skip
    module, one = Recorder(), trainer(tmp_path, max_epochs=1)
    one.fit(module, datamodule=data)
    assert module.train_batches[0][0].response_ids[-1] == protocol.stop_token_ids[0]
    assert [(len(batch), sampled_by(batch)) for _, batch in module.val_batches] == [(3, {5})]
    one.test(module, datamodule=data, verbose=False)
    assert [t.reward.total for _, batch in module.test_batches for t in batch] == [0.0, 0.0]


def test_files_that_are_not_there_or_not_trajectories(model_dir, question_file, tmp_path):
    def load(path):
        SupervisedDataModule([str(path)], batch_size=2, tokenizer=str(model_dir)).setup("fit")

    with pytest.raises(DatasetError, match="no such file"):
        load(tmp_path / "nothing.parquet")
    with pytest.raises(ValueError, match="is not a trajectory file"):
        load(question_file("questions", ["right"]))


def test_trajectories_that_are_too_long_are_named(make_data, make_system, trajectories, caplog):
    lengths = [len(t.prompt_ids) for t in trajectories[:39]]
    longest = max(lengths)
    data = make_data(rollouts=make_system(max_length=longest + 1))
    data.setup("fit")
    assert data.report["kept"] == 39 and "left out" not in caplog.text
    data = make_data(rollouts=make_system(max_length=longest))
    data.setup("fit")
    left = lengths.count(longest)
    assert (data.report["kept"], data.report["too_long"]) == (39 - left, left) and left
    assert f"{left} of 39 trajectories are left out" in caplog.text and f"max_length ({longest}); id q" in caplog.text
    caplog.clear()
    data = make_data(max_tokens=max(map(length_of, trajectories)))  # and one of EOS
    data.setup("fit")
    assert data.report["too_long"] and "trajectories are left out: longer than max_tokens" in caplog.text
