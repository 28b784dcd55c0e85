import itertools
import random

import pytest

from data_modules.datasets.files import spread
from data_modules.loading.loaders import EvaluationLoader, TrainLoader, permutation
from data_modules.supervised_data_module import BatchPlan
from rollout.protocols.base import PromptMode


def test_stream_goes_on_over_passes_and_after_a_restore():
    loader = TrainLoader(3, lambda i: [i], "data")
    assert list(loader) + list(loader) == [[0], [1], [2], [3], [4], [5]]
    assert len(loader) == 3
    again = TrainLoader(3, lambda i: [i], "data")
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)) == [6]
    assert again.state_dict() == {"position": 7, "data": "data", "sampling": ""}


def test_nothing_is_made_before_it_is_asked_for():
    made = []
    loader = TrainLoader(3, lambda i: made.append(i) or [i], "data")
    iterator = iter(loader)
    assert made == []
    next(iterator)
    assert made == [0]


def test_a_batch_that_fails_is_not_counted():
    def fail(i):
        raise RuntimeError("retriever down")

    loader = TrainLoader(3, fail, "data")
    with pytest.raises(RuntimeError):
        next(iter(loader))
    assert loader.state_dict()["position"] == 0


def test_permutation_depends_on_the_seed_alone():
    random.seed(5)
    first = permutation(50, 7)
    random.seed(6)
    assert permutation(50, 7) == first != permutation(50, 8)
    assert sorted(first) == list(range(50))


def test_spread_keeps_order_and_reaches_all_parts():
    assert spread(range(10), None) == spread(range(10), 10) == spread(range(10), 99) == list(range(10))
    assert spread(range(10), 4) == [0, 2, 5, 7]


@pytest.mark.parametrize(("n", "world", "batch"), list(itertools.product([1, 5, 8, 13], [1, 2, 3], [1, 4])))
def test_evaluation_shards_cover_every_row_once_with_equal_numbers_of_batches(n, world, batch):
    seen, lengths = [], set()
    for rank in range(world):
        loader = EvaluationLoader(range(n), PromptMode.AGENT, batch, lambda tasks, mode: list(tasks), rank, world)
        batches = list(loader)
        assert all(len(b) <= batch for b in batches)
        assert len(batches) == len(loader)
        assert max(map(len, batches), default=0) - min(map(len, batches), default=0) <= 1
        lengths.add(len(batches))
        seen += [task for b in batches for task in b]
    assert sorted(seen) == list(range(n))
    assert len(lengths) == 1


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"batch_size": 7, "bucket_batches": 3}, {"batch_tokens": 60},
                                      {"batch_tokens": 200, "bucket_batches": 2}])  # fmt: skip
@pytest.mark.parametrize("n", [1, 9, 41])
def test_every_pass_uses_everything_once_in_the_same_number_of_batches(settings, n):
    lengths = [random.Random(n).randint(5, 60) if i % 3 else 60 for i in range(n)]
    plan = BatchPlan(lengths, 3, **settings)
    for number in range(4):
        batches = plan.of_pass(number)
        assert len(batches) == plan.batches
        assert all(batches), "an empty batch"
        assert sorted(i for b in batches for i in b) == list(range(n))
        assert max(map(len, batches)) <= settings.get("batch_size", n)
    assert BatchPlan(lengths, 3, **settings).of_pass(2) == plan.of_pass(2)
    if n == 41:
        assert plan.of_pass(0) != plan.of_pass(1)
        assert BatchPlan(lengths, 4, **settings).of_pass(0) != plan.of_pass(0)


def test_buckets_make_lengths_alike():
    lengths = [random.Random(i).randint(20, 400) for i in range(256)]

    def padding(plan):
        return sum(len(b) * max(lengths[i] for i in b) for b in plan.of_pass(0)) / sum(lengths)

    assert padding(BatchPlan(lengths, 0, batch_size=16, bucket_batches=8)) < 1.15
    assert padding(BatchPlan(lengths, 0, batch_size=16)) > 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "exactly one"), ({"batch_size": 1, "batch_tokens": 9}, "exactly one"), ({"batch_size": 0}, "batch_size is 0"),
     ({"batch_tokens": 9}, "the longest trajectory has 10 tokens")],
)  # fmt: skip
def test_plans_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        BatchPlan([10, 5], 0, **settings)
