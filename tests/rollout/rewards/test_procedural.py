"""reasoning-gym: its tasks, and its scorers in processes of their own."""

import json
from types import SimpleNamespace

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from data_modules.datasets.questions import load_tasks
from data_modules.datasets.reasoning_gym_tasks import ReasoningGymTasks
from rollout.rewards import procedural
from rollout.rewards.deadline import DeadlineExceeded, WorkerDied
from rollout.rewards.procedural import KEY, ReasoningGymReward, score_answer
from rollout.trajectory import StopReason, Task, Trajectory

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# An answer of their own is not among their entries, or it does not get the full score from their scorers.
WITHOUT_ORACLE = {"propositional_logic", "rubiks_cube", "rush_hour", "graph_color", "boxnet"}
SLOW = {"knight_swap"}  # 20 s an item


def answered(answer, metadata=None):
    task = Task("a", "q", (), "d", metadata=metadata or {})
    return Trajectory(task, (1,), (), (), (), (), (), StopReason.ANSWER, "a", 0, answer=answer)


def item(name, index=0, seed=3, size=4, **options):
    return {"dataset": name, "options": options, "seed": seed, "size": size, "index": index}


def test_splits_have_no_question_in_common_and_keep_the_items(tmp_path):
    sizes = ReasoningGymTasks({"chain_sum": SUMS, "letter_counting": {}}, train=100, val=20, test=20).run(tmp_path)
    splits = {name: load_tasks(tmp_path / f"{name}.parquet") for name in ("train", "val", "test")}
    assert sizes == {name: len(tasks) for name, tasks in splits.items()} and sizes["test"] == 20
    asked = {name: {task.question for task in tasks} for name, tasks in splits.items()}
    assert not asked["train"] & asked["val"] | asked["train"] & asked["test"] | asked["val"] & asked["test"]
    for task in splits["train"][:5] + splits["test"][-5:]:
        about = dict(task.metadata[KEY])
        data = reasoning_gym.create_dataset(about["dataset"], seed=0, size=about["size"], **about["options"])
        assert data[about["index"]]["question"] == task.question
        assert task.golden_answers == (data[about["index"]]["answer"],)


@pytest.mark.parametrize(
    "datasets", [{"chain_sums": {}}, {"chain_sum": {"terms": 2}}, {"chain_sum": {"min_terms": -1}}]
)
def test_unknown_data_sets_and_options_are_refused(datasets):
    with pytest.raises(ValueError, match="reasoning-gym makes no data set chain_sum"):
        ReasoningGymTasks(datasets)


def test_a_deadline_missed_once_is_no_verdict(monkeypatch):
    asked, said = [], iter([DeadlineExceeded("late"), (1.0, ""), DeadlineExceeded("late"), WorkerDied("killed")])

    def call(*arguments, timeout_s):
        asked.append(arguments)
        found = next(said)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(procedural, "_PROCESSES", SimpleNamespace(call=call))
    procedural._remembered.cache_clear()
    for text, score in (("12", 1.0), ("13", 0.0)):
        trajectory = answered(text, {KEY: item("chain_sum", 99)})
        assert [ReasoningGymReward().score(trajectory).total for _ in range(3)] == [score] * 3, "of a group alike"
    assert len(asked) == 4
    procedural._remembered.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - SLOW - {"composite"}))
def test_each_data_set_scores_its_own_answers_fully_and_odd_ones_without_failing(name):
    entry = reasoning_gym.create_dataset(name, seed=3, size=4)[1]
    about = json.dumps(item(name, 1))
    if name not in WITHOUT_ORACLE and entry["answer"] is not None:
        assert score_answer(about, str(entry["answer"])) == (1.0, "")
    for odd in ("", "x", "1/0", "((", "{}", "1e999", "9" * 400):
        value, _ = score_answer(about, odd)
        assert 0.0 <= value <= 1.0


def test_reward_is_the_scorers_value_in_a_process_of_its_own():
    sums = item("chain_sum", **SUMS)
    gold = reasoning_gym.create_dataset("chain_sum", seed=3, size=4, **SUMS)[0]["answer"]
    reward = ReasoningGymReward()
    right = reward.score(answered(gold, metadata={KEY: sums}))
    assert (right.total, right.parts) == (1.0, {"acc": 1.0, "score": 1.0, "answered": 1.0})
    wrong = reward.score(answered(f"{gold}1", metadata={KEY: sums}))
    assert wrong.total < 1.0 and wrong.parts["acc"] == 0.0
    none = reward.score(answered(None, metadata={KEY: sums}))
    assert (none.total, none.parts["answered"]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="has no metadata.reasoning_gym"):
        reward.score(answered(gold))


def test_a_scorer_that_hangs_or_raises_scores_0_and_is_logged(caplog):
    hangs = ReasoningGymReward(timeout_s=3.0).score(answered("9**9**9**9**9", metadata={KEY: item("countdown")}))
    assert hangs.total == 0.0 and "the scorer of countdown failed on '9**9" in caplog.text
    raises = ReasoningGymReward().score(answered("((", metadata={KEY: item("prime_factorization")}))
    assert raises.total == 0.0 and "prime_factorization failed" in caplog.text and "ValueError" in caplog.text


def test_items_are_made_again_alike():
    for name in ("arc_agi", "rearc"):  # through JSON they lose their score
        entry = reasoning_gym.create_dataset(name, seed=3, size=4)[2]
        assert procedural.score_answer(json.dumps(item(name, 2)), entry["answer"]) == (1.0, "")
