import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from common.schedules import Schedule
from data_modules.datasets.files import DatasetError
from data_modules.loading.decoding import Decoding
from data_modules.loading.failure_guard import TooManyFailuresError
from data_modules.rollout_data_module import RolloutDataModule
from rollout.loop.guide import Guide
from rollout.skills.injection import Skills
from rollout.skills.retrieval import TaskType
from rollout.system import TestLimits
from tests.data_modules.toys import Recorder, sampled_by, trainer
from tests.processes import run_group
from tests.rollout.scripted_engine import ScriptedEngine


def groups(batches):
    return [[t.group for t in batch] for batch in batches]


@pytest.fixture
def make_data(make_system, question_file):
    def make(kinds=("right",) * 10, **options) -> RolloutDataModule:
        options = {"prompts_per_iteration": 3, "group_size": 2, "seed": 1, **options}
        return RolloutDataModule(make_system(), [question_file("train", list(kinds))], **options)

    return make


def test_each_batch_is_sampled_with_the_weights_of_the_step_before(make_data, tmp_path):
    data, module = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    assert [len(batch) for batch in module.train_batches] == [6] * 6
    assert [sampled_by(batch) for batch in module.train_batches] == [{0}, {1}, {2}, {3}, {4}, {5}]


def test_batches_are_whole_groups_in_a_seeded_order_that_differs_by_pass(make_data, tmp_path):
    data, module = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    seen = groups(module.train_batches)
    for batch in seen:
        assert batch[::2] == batch[1::2], "the two samples of a prompt are neighbours"
        assert len(set(batch)) == 3
    first, second = (sum((b[::2] for b in part), []) for part in (seen[:3], seen[3:]))
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    assert [task.id for task in data.training_questions] == [f"q{i}" for i in range(len(data.training_questions))]
    assert {task.id for task in data.training_questions} >= {*first, *second}
    assert [t.group for t in module.train_batches[0]] != [f"q{i // 2}" for i in range(6)]
    other = Recorder()
    trainer(tmp_path, max_epochs=1).fit(other, datamodule=make_data(seed=2))
    assert groups(other.train_batches) != seen[:3]


def seeds(data):
    return [(r.sampling.seed, r.token_ids) for r in data.rollouts.engine.requests]


@pytest.mark.parametrize("stop_after", [3, 5])
def test_resumed_run_asks_for_exactly_the_same(make_data, tmp_path, stop_after):
    whole, module = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=whole)
    first, cut = make_data(), Recorder(stop_after=stop_after)
    checkpoint = ModelCheckpoint(tmp_path / "c", filename="last", every_n_train_steps=1, enable_version_counter=False)
    with pytest.raises(RuntimeError, match="switched off"):
        trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]).fit(cut, datamodule=first)
    second, rest = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(rest, datamodule=second, ckpt_path=tmp_path / "c" / "last.ckpt")
    # the step that was cut short is done again, everything before it is not
    assert groups(cut.train_batches)[: stop_after - 1] + groups(rest.train_batches) == groups(module.train_batches)
    done = 6 * (stop_after - 1)
    assert sorted(seeds(whole)[done:]) == sorted(seeds(second))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from lightning.pytorch.callbacks import ModelCheckpoint
from data_modules.rollout_data_module import RolloutDataModule
from tests.data_modules.toys import Recorder, scripted_system, trainer

model, questions, folder = sys.argv[1:]
asked = []
def script(ids, sampling):
    asked.append(sampling.seed)
    if len(asked) == 28:  # in the middle of the fifth iteration's rollouts
        os.kill(os.getpid(), signal.SIGKILL)
    return "<answer> x </answer>"
data = RolloutDataModule(scripted_system(model, script), [questions], prompts_per_iteration=3, group_size=2, seed=1)
saver = ModelCheckpoint(Path(folder), filename="last", every_n_train_steps=1, enable_version_counter=False)
trainer(folder, max_epochs=2, enable_checkpointing=True, callbacks=[saver]).fit(Recorder(), datamodule=data)
"""


@pytest.mark.slow
def test_position_survives_kill_9_while_rolling_out(make_data, model_dir, tmp_path):
    whole, module = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=whole)
    command = [sys.executable, "-c", KILLED, str(model_dir), whole.train_files[0], str(tmp_path / "c")]
    child = run_group(command, timeout=400)
    assert child.returncode == -signal.SIGKILL, child.stderr[-2000:]
    resumed, rest = make_data(), Recorder()
    trainer(tmp_path, max_epochs=2).fit(rest, datamodule=resumed, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert groups(rest.train_batches) == groups(module.train_batches)[4:]
    assert sorted(seeds(resumed)) == sorted(seeds(whole)[24:])


def test_a_checkpoint_of_other_data_is_refused(make_data):
    data = make_data()
    data.setup("fit")
    for other in (make_data(prompts_per_iteration=2), make_data(seed=5), make_data(max_train=9)):
        other.setup("fit")
        with pytest.raises(ValueError, match="written over other training data"):
            other.load_state_dict(data.state_dict())


def test_a_checkpoint_of_another_sampling_is_refused_but_not_one_from_before_it_was_saved(make_data):
    data = make_data()
    data.setup("fit")
    state = data.state_dict()
    for other in (make_data(group_size=3), make_data(train_sampling=Decoding(temperature=0.7)),
                  make_data(dynamic_sampling=1)):  # fmt: skip
        other.setup("fit")
        with pytest.raises(
            ValueError, match="group_size, train_sampling, dynamic_sampling, mixing or the guide.s share differ"
        ):
            other.load_state_dict(state)
        older = {"train": {name: value for name, value in state["train"].items() if name != "sampling"}}
        other.load_state_dict(older | {"train": older["train"] | {"position": 2}})
        assert other.state_dict()["train"]["position"] == 2


def test_two_ranks_together_do_what_one_does(make_data):
    def first_batches(rank, world):
        data = make_data(prompts_per_iteration=4, balance_tokens=False)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        data.setup("fit")
        loader = data.train_dataloader()
        return len(loader), [batch for _, batch in zip(range(3), loader, strict=False)], data

    length, alone, one = first_batches(0, 1)
    parts = [first_batches(rank, 2) for rank in range(2)]
    assert [part[0] for part in parts] == [length, length]
    for step in range(2):
        shared = [t for part in parts for t in part[1][step]]
        assert sorted(t.group for t in shared) == sorted(t.group for t in alone[step])
        assert [len({t.group for t in part[1][step]}) for part in parts] == [2, 2]
    assert sorted(seeds(one)) == sorted(seeds(parts[0][2]) + seeds(parts[1][2]))
    odd = make_data(prompts_per_iteration=3)
    odd.trainer = SimpleNamespace(global_rank=0, world_size=2)
    with pytest.raises(ValueError, match="which 2 ranks cannot share equally"):
        odd.setup("fit")


RANKS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from rollout.trajectory import InfrastructureError
from data_modules.loading.failure_guard import TooManyFailuresError
from data_modules.rollout_data_module import RolloutDataModule
from tests.data_modules.toys import Recorder, scripted_system, trainer

model, questions, folder = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
asked = []
def script(ids, sampling):
    asked.append(sampling.seed)
    down = rank == 1 and len(asked) > 4  # in the third iteration, on one rank only
    return InfrastructureError("down") if down else "<answer> x </answer>"
data = RolloutDataModule(scripted_system(model, script), [questions], prompts_per_iteration=4, seed=1,
                         balance_tokens=False, max_infrastructure_failures=0.4, max_consecutive_failures=1)
module, stopped = Recorder(), ""
one = trainer(folder, ranks=2, max_epochs=9)
try:
    one.fit(module, datamodule=data)
except TooManyFailuresError as error:
    stopped = str(error)
names = [[t.group for t in batch] for batch in module.train_batches]
Path(folder, f"rank{rank}.json").write_text(json.dumps({"train": names, "stopped": stopped, "seeds": asked}))
"""


@pytest.mark.slow
def test_under_ddp_ranks_share_the_prompts_and_stop_together(make_data, model_dir, tmp_path):
    alone = make_data(prompts_per_iteration=4, group_size=1)
    alone.setup("fit")
    expected = [[t.group for t in batch] for batch in alone.train_dataloader()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    worker = [sys.executable, "-c", RANKS, str(model_dir), alone.train_files[0], str(tmp_path)]
    child = run_group([*torchrun, *worker], timeout=400)
    assert child.returncode == 0, child.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for step, whole in enumerate(expected):  # the two iterations of the first pass
        assert [rank["train"][step] for rank in ranks] == [whole[:2], whole[2:]]
    assert [len(rank["train"]) for rank in ranks] == [2, 2]
    assert {rank["stopped"].partition(",")[0] for rank in ranks} == {
        "training iteration 3: 2 of 4 trajectories failed by infrastructure"
    }, "the rank without failures must stop too"


def test_failures_are_passed_on_until_there_are_too_many_in_a_row(make_data, tmp_path):
    data, module = make_data(["right"] * 8 + ["broken"], prompts_per_iteration=9), Recorder()
    trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)  # 1 of 9 is below the limit
    assert [sum(t.left_out for t in b) for b in module.train_batches] == [2, 2]
    assert data.infrastructure_failures == pytest.approx(1 / 9)

    data, module = make_data(["broken"] * 9, max_consecutive_failures=2), Recorder()
    with pytest.raises(TooManyFailuresError, match=r"iteration 2: 6 of 6 .* 20% 2 times in a row .*http://nowhere"):
        trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
    assert len(module.train_batches) == 1
    assert data.state_dict()["train"]["position"] == 1, "the iteration that was not trained on is not counted"


def test_the_guide_s_share_follows_the_iteration_and_evaluations_have_none(make_system, question_file, tmp_path):
    teacher = ScriptedEngine(lambda ids, sampling: "<answer> answer 0 </answer>", make_system().protocol.tokenizer)
    system = make_system(guide=Guide(teacher, Schedule(1.0, 0.0, iterations=1)))
    files = {name: [question_file(name, ["wrong"] * 2)] for name in ("train", "val")}
    options = {"train_files": files["train"], "val_files": files["val"], "prompts_per_iteration": 2, "iterations": 2}
    module, data = Recorder(), RolloutDataModule(system, seed=0, **options)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert [[turn.guided for t in batch for turn in t.turns] for batch in module.train_batches] == [
        [True] * 2,
        [False] * 2,
    ]
    assert len(teacher.requests) == 2 and module.val_batches
    other = RolloutDataModule(make_system(guide=Guide(teacher, 0.5)), seed=0, **options)
    other.setup("fit")
    with pytest.raises(ValueError, match="the guide's share differ"):
        other.load_state_dict(data.state_dict())


def test_ctrl_c_while_rolling_out_ends_promptly_and_closes_the_engine(make_system, question_file, tmp_path):
    system = make_system(latency=36000.0)
    data = RolloutDataModule(system, [question_file("train", ["right"] * 4)], prompts_per_iteration=4, seed=0)

    ended = threading.Event()

    def press():
        while not system.engine.requests:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not ended.wait(30):  # the first may come just before the wait
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer(tmp_path, max_epochs=1).fit(Recorder(), datamodule=data)
    finally:
        ended.set()
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert not system.running, "the rollout system still runs"


def test_rollout_system_stays_up_from_fit_to_test_and_is_closed_after(make_data, question_file, tmp_path, monkeypatch):
    starts = []
    data = make_data(test_files=[question_file("test", ["right"] * 3)])
    start, close = data.rollouts.engine.start, data.rollouts.engine.close

    async def counted(what, real):
        starts.append(what)
        await real()

    def opening():
        return counted("start", start) if not data.rollouts.engine._alive else start()

    monkeypatch.setattr(data.rollouts.engine, "start", opening)
    monkeypatch.setattr(data.rollouts.engine, "close", lambda: counted("close", close))
    one = trainer(tmp_path, max_epochs=1)
    one.fit(Recorder(), datamodule=data)
    one.test(Recorder(), datamodule=data, verbose=False)
    assert starts == ["start", "close"]
    data.close()
    assert starts == ["start", "close"]


def test_the_module_is_asked_before_the_engine_starts(make_data, question_file, tmp_path):
    """With its questions read, and with validation questions too, for which ``setup`` of the base class starts it."""

    class Picky(Recorder):
        def accept_data(self, data):
            self.seen = [task.id for task in data.training_questions]
            raise ValueError("nothing to learn here")

    for files in ([], [question_file("val", ["right"])]):
        data, module = make_data(val_files=files), Picky()
        with pytest.raises(ValueError, match="nothing to learn here"):
            trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
        assert module.seen == [f"q{i}" for i in range(10)]
        assert not data.rollouts.running and not data._running, "nothing was started"


def test_tasks_that_the_students_skills_do_not_know_are_refused_before_the_engine_starts(make_data, question_file):
    """Those of a test are given none where ``eval_skills`` is false."""

    def advised(**options):
        data = make_data(test_files=[question_file("test", ["right"], source="juggling")], **options)
        data.rollouts.skills = Skills("search", TaskType())
        return data

    training, test, plain = advised(), advised(), advised(eval_skills=False)
    with pytest.raises(DatasetError, match="no category for data source 'made_up'"):
        training.setup("fit")
    with pytest.raises(DatasetError, match="no category for data source 'juggling'"):
        test.setup("test")
    assert not training.rollouts.running and not test.rollouts.running
    plain.setup("test")
    assert plain.rollouts.running


def test_evaluation_is_greedy_complete_and_says_which_loader_is_which(make_data, question_file, tmp_path):
    val, test = question_file("val", ["right", "wrong"] * 3), question_file("test", ["right"] * 5 + ["wrong"] * 2)
    data = make_data(val_files=[val], test_files=[test], eval_batch=3, diagnostic_prompts=["gold_think", "closed_book"])
    module, one = Recorder(), trainer(tmp_path, max_epochs=1)
    one.fit(module, datamodule=data)
    assert data.prompt_modes("val") == ["agent"]
    assert [len(batch) for _, batch in module.val_batches] == [3, 3]
    assert [sampled_by(batch) for _, batch in module.val_batches] == [{3}, {3}], "validated with the trained weights"
    train = len(data.rollouts.engine.requests)
    one.test(module, datamodule=data, verbose=False)
    assert data.prompt_modes("test") == ["agent", "gold_think", "closed_book"]
    by_loader = [[t for i, batch in module.test_batches if i == index for t in batch] for index in range(3)]
    assert [t.group for t in by_loader[0]] == [f"q{i}" for i in range(7)] == [t.group for t in by_loader[2]]
    assert [t.group for t in by_loader[1]] == ["q0", "q2", "q4", "q6"], "those with gold passages"
    assert [t.reward.parts["em"] for t in by_loader[0]] == [1.0] * 5 + [0.0] * 2
    assert "<information>" in data.rollouts.protocol.decode(list(by_loader[1][0].prompt_ids))
    assert {r.sampling.temperature for r in data.rollouts.engine.requests[train:]} == {0.0}
    assert {r.sampling.temperature for r in data.rollouts.engine.requests[:18]} == {1.0}


def test_validation_may_have_its_own_decoding_and_the_test_its_own_limits(make_data, question_file, tmp_path):
    files = {"val_files": [question_file("val", ["right"] * 2)], "test_files": [question_file("test", ["right"] * 2)]}
    data, module = make_data(eval_sampling=Decoding(0.6), val_sampling=Decoding(0.0), **files), Recorder()
    limited = TestLimits(max_turn_tokens=7).applied(data.rollouts.budgets)
    data.rollouts._test_loop = data.rollouts.agent_loop.with_budgets(limited)
    one = trainer(tmp_path, max_epochs=1)
    one.fit(module, datamodule=data)
    fitted = data.rollouts.engine.requests.copy()
    one.test(module, datamodule=data, verbose=False)
    tested = [r.sampling for r in data.rollouts.engine.requests[len(fitted) :]]
    assert {r.sampling.temperature for r in fitted} == {0.0, 1.0} and {s.temperature for s in tested} == {0.6}
    assert {r.sampling.max_new_tokens for r in fitted} == {data.rollouts.budgets.max_turn_tokens}
    assert {s.max_new_tokens for s in tested} == {7}


def test_limits_of_evaluation_are_spread_over_the_file(make_data, question_file):
    files = [question_file("test", ["right"] * 10)]
    data = make_data(test_files=files, max_test=5, diagnostic_prompts=["gold_direct"], max_diagnostic_prompts=2)
    data.setup("test")
    agent, probe = data.test_dataloader()
    assert [t.id for t in agent.tasks] == ["q0", "q2", "q4", "q6", "q8"]
    assert [t.id for t in probe.tasks] == ["q0", "q4"]


def test_probes_without_gold_passages_and_failing_evaluations_are_refused(make_data, question_file):
    path = question_file("odd", ["right", "broken"])
    data = make_data(test_files=[path], diagnostic_prompts=["gold_direct"], max_test=None)
    data.setup("test")
    with pytest.raises(TooManyFailuresError, match=r"test \(agent\): 1 of 2 trajectories failed"):
        list(data.test_dataloader()[0])
    import polars as pl

    pl.read_parquet(path).drop("gold_passages").write_parquet(path)
    with pytest.raises(
        DatasetError, match="diagnostic prompt 'gold_direct' needs questions with gold passages, but none of the 2"
    ):
        make_data(test_files=[path], diagnostic_prompts=["gold_direct"]).setup("test")
    training = make_data(test_files=[path], diagnostic_prompts=["gold_direct"])
    with pytest.raises(DatasetError, match="diagnostic prompt 'gold_direct' needs questions with gold passages"):
        training.setup("fit")  # not when the test comes, after the training
    assert not training._running, "refused before the engine starts"
    make_data(test_files=[path], diagnostic_prompts=["closed_book"]).setup("test")
