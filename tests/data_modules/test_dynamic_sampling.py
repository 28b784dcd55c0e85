"""Groups of which nothing can be learnt are replaced, by draws that depend on (seed, iteration, place) alone."""

from types import SimpleNamespace

import pytest

from data_modules.datasets.files import DatasetError
from data_modules.loading.failure_guard import TooManyFailuresError
from data_modules.rollout_data_module import RolloutDataModule, differs
from tests.data_modules.toys import Recorder, trainer

KINDS = ["right", "wrong", "mixed", "right", "wrong", "right"] * 4


@pytest.fixture
def make_data(make_system, question_file):
    def make(kinds=KINDS, rank=0, world=1, **options) -> RolloutDataModule:
        options = {"prompts_per_iteration": 4, "group_size": 4, "seed": 1, "dynamic_sampling": 3, **options}
        data = RolloutDataModule(make_system(), [question_file("train", list(kinds))], **options)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        data.setup("fit")
        return data

    return make


def batches(data, n=3):
    return [batch for _, batch in zip(range(n), data.train_dataloader(), strict=False)]


def names(batch):
    return [t.group for t in batch[::4]]


def rewards(batch):
    return [[t.reward.total for t in batch[i : i + 4]] for i in range(0, len(batch), 4)]


def slow_form(data, iteration):
    """Place by place, each to its end: roll out its prompts one after the other until one group differs."""
    chosen = []
    for place, own in enumerate(data.prompts(iteration)):
        candidates = [own] + [data.further_prompts(iteration, a)[place] for a in range(data.dynamic_sampling)]
        groups = [data._groups([task], iteration)[0] for task in candidates]
        chosen += next((group for group in groups if differs(group)), groups[0])
    return chosen


def test_zero_variance_groups_are_replaced_until_there_are_enough_or_the_rounds_are_used_up(make_data):
    data = make_data()
    seen = []
    for iteration, batch in enumerate(batches(data)):
        assert len(batch) == 16 and all(len({t.group for t in batch[i : i + 4]}) == 1 for i in range(0, 16, 4))
        assert len(set(names(batch))) == 4, "no question stands twice in a batch"
        slow = slow_form(make_data(), iteration)
        key = [(t.group, t.index, t.response_ids) for t in batch]
        assert key == [(t.group, t.index, t.response_ids) for t in slow]
        own = [task.id for task in data.prompts(iteration)]
        for place, group in enumerate(rewards(batch)):
            kept = names(batch)[place] == own[place]
            assert kept or len(set(group)) > 1, "only what differs takes another's place"
            seen.append((kept, len(set(group)) > 1))
    assert set(seen) == {(True, True), (True, False), (False, True)}, "all three cases, or this shows nothing"


def test_what_was_thrown_away_is_counted(make_data):
    data = make_data()
    for _, _ in zip(range(3), data.train_dataloader(), strict=False):
        asked = len(data.rollouts.engine.requests)
        discarded, rolled_out = data.discarded_groups
        assert asked == 4 * rolled_out and discarded == rolled_out - 4 > 0
        data.rollouts.engine.requests.clear()
    useful = make_data(["mixed"] * 16, group_size=16)
    batches(useful, 1)
    assert useful.discarded_groups == (0, 4)
    off = make_data(dynamic_sampling=None)
    assert [names(b) for b in batches(off)] == [[t.id for t in off.prompts(i)] for i in range(3)]
    assert off.discarded_groups is None and len(off.rollouts.engine.requests) == 3 * 16


def test_further_prompts_are_others_and_depend_on_seed_and_iteration_only(make_data):
    data = make_data()
    drawn = {}
    for iteration in (5, 0, 3):
        rounds = [[t.id for t in data.further_prompts(iteration, a)] for a in range(3)]
        together = sum(rounds, [t.id for t in data.prompts(iteration)])
        assert len(set(together)) == len(together) == 16
        drawn[iteration] = rounds
    again = make_data()
    assert {i: [[t.id for t in again.further_prompts(i, a)] for a in range(3)] for i in (0, 3, 5)} == drawn
    assert drawn[0] != drawn[3]
    assert [[t.id for t in make_data(seed=2).further_prompts(0, a)] for a in range(3)] != drawn[0]


def test_two_ranks_make_the_batch_that_one_makes(make_data):
    alone = batches(make_data())
    first, second = (batches(make_data(rank=rank, world=2, balance_tokens=False)) for rank in range(2))
    for whole, left, right in zip(alone, first, second, strict=True):
        assert [(t.group, t.response_ids) for t in [*left, *right]] == [(t.group, t.response_ids) for t in whole]


def test_a_resumed_run_draws_the_same(make_data):
    whole = batches(make_data(), 5)
    resumed = make_data()
    state = make_data().state_dict()
    state["train"]["position"] = 2
    resumed.load_state_dict(state)
    assert [names(b) for b in batches(resumed, 3)] == [names(b) for b in whole[2:]]


def test_failures_in_what_was_thrown_away_are_counted_too(make_data):
    data = make_data(["broken"] * 12 + ["mixed"] * 4, max_infrastructure_failures=0.2, max_consecutive_failures=1)
    with pytest.raises(TooManyFailuresError, match="trajectories failed by infrastructure") as caught:
        batches(data, 3)
    assert int(str(caught.value).split(" of ")[1].split()[0]) > 16, "of all that was rolled out, not of the batch"


def test_under_lightning_the_batches_arrive(make_data, make_system, question_file, tmp_path):
    options = {"prompts_per_iteration": 4, "group_size": 4, "seed": 1, "dynamic_sampling": 3, "iterations": 2}
    module = Recorder()
    data = RolloutDataModule(make_system(), [question_file("train", KINDS)], **options)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert [names(b) for b in module.train_batches] == [names(b) for b in batches(make_data(), 2)]


def test_what_cannot_work_is_refused(make_data):
    with pytest.raises(ValueError, match="a group of one never differ"):
        make_data(group_size=1)
    with pytest.raises(
        DatasetError, match="24 questions, but one iteration with dynamic_sampling = 6 may take 28 different"
    ):
        make_data(dynamic_sampling=6)
